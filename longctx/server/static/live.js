// What the server does now: asked for twice a second while something runs, less often otherwise.
const BUSY_MS = 500;
const IDLE_MS = 2000;
const HIDDEN_MS = 10000;
const RETRY_MS = 1500;
const SHOWN_LAST = 20;

let modelKnown = false;

async function follow() {
  for (;;) {
    let wait = RETRY_MS;
    try {
      wait = await look();
    } catch (error) {
      showLost(error);
    }
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, document.hidden ? HIDDEN_MS : wait);
    });
  }
}
let wake = () => {};
document.addEventListener("visibilitychange", () => document.hidden || wake());

async function look() {
  const state = await askJson("/ready", { accept: [200, 503] });
  document.body.classList.remove("stale");
  showState(state);
  try {
    await lookInside(state);
    showNotice("");
  } catch (error) {
    if (error.status !== 401) throw error;
    showLocked(error);
    return IDLE_MS;
  }
  return state.running_requests || state.engine !== "ready" ? BUSY_MS : IDLE_MS;
}

async function lookInside(state) {
  if (!modelKnown && state.engine === "ready") await learnModel();
  const [requests, metrics] = await Promise.all([askJson(`/v1/requests?limit=${SHOWN_LAST}`), ask("/metrics")]);
  const samples = parseMetrics(await metrics.text());
  const now = performance.now() / 1e3;
  showRequests(requests.data, now);
  showTiers(samples("longctx_kv_bytes"));
  showPace(samples, now);
  const born = sum(samples("process_start_time_seconds"));
  const serverNow = Date.parse(metrics.headers.get("Date") ?? "") / 1e3;
  setText(byId("uptime"), born && serverNow ? `up ${formatUptime(serverNow - born)}` : "");
}

// -- the head -------------------------------------------------------------------------------------------------------

function formatUptime(seconds) {
  return seconds < 120 ? formatAbout(Math.max(0, seconds)) : formatSeconds(60 * Math.floor(seconds / 60)).replace(" 00 s", "");
}

function showState(state) {
  const [word, kind] = state.draining ? ["shutting down", "warn"] : {
    ready: ["ready", "good"], starting: ["loading", "warn"], restarting: ["restarting", "warn"],
    stopping: ["stopping", "warn"], failed: ["failed", "bad"],
  }[state.engine] ?? [state.engine, "idle"];
  setPill(byId("state"), word, kind);
  setText(byId("version"), state.version ? `longctx ${state.version}` : "");
  const loading = state.engine === "ready" ? null : state.loading;
  byId("loading").hidden = !loading;
  byId("runs-empty").hidden = Boolean(loading) || byId("runs").children.length > 0;
  if (loading) {
    setText(byId("loading-figure"), formatProgress(loading.done, loading.total));
    setText(byId("loading-stage"), loading.stage);
    setBar(byId("loading-bar"), [["computed", loading.done]], loading.total);
    setAttribute(byId("loading-bar"), "aria-valuenow", loading.total ? Math.floor((100 * loading.done) / loading.total) : 0);
  }
  if (state.engine !== "ready") modelKnown = false;
  const failed = ["failed", "restarting"].includes(state.engine) && state.last_failure;
  setText(byId("runs-empty"), failed ? `The engine ended: ${state.last_failure}` : "Nothing is running.");
}

async function learnModel() {
  const { data: [model] } = await askJson("/v1/models");
  suggestLength(model.longest_request);
  const line = byId("model");
  line.replaceChildren(make("strong", "", model.id));
  line.append(` ${formatCount(model.longest_request)} tokens at most, KV ${model.kv_format}`);
  modelName = model.id;
  modelKnown = true;
  await chooseKind();
}
let modelName = "";

function showLost() {
  document.body.classList.add("stale");
  document.title = "longctx";
  setPill(byId("state"), "disconnected", "bad");
  setText(byId("uptime"), "");
  showNotice("The server does not answer. What is shown is from before; the page reconnects by itself.");
  modelKnown = false;
}

function showLocked(error) {
  byId("key-open").hidden = false;
  const wrong = error.code === "invalid_api_key";
  showNotice(wrong ? "The server does not know this API key." : "This server asks for an API key.", "Enter a key");
}

function showNotice(text, action = "") {
  if (apiKey()) byId("key-open").hidden = false;
  byId("notice").hidden = !text;
  setText(byId("notice-text"), text);
  byId("notice-action").hidden = !action;
  setText(byId("notice-action"), action);
}
