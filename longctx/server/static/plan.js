// The box that plans before anything runs.
const VERDICTS = {
  fits: ["fits", "good"], spills: ["spills", "warn"], needs_quantization: ["needs a smaller format", "warn"],
  refused: ["does not fit", "bad"],
};

function planBody() {
  const body = { max_tokens: byId("plan-max").valueAsNumber, concurrency: byId("plan-concurrency").valueAsNumber };
  if (chosen("plan-kind") === "prompt") return { ...body, prompt: byId("plan-prompt").value };
  // The server counts prompt and answer together; what is no number it explains better itself.
  const prompt = parseTokens(byId("plan-tokens").value);
  const tokens = prompt == null ? byId("plan-tokens").value : prompt + body.max_tokens;
  return { tokens, concurrency: body.concurrency };
}

// Before anybody has written another length: the first plan should fit.
function suggestLength(longest) {
  const input = byId("plan-tokens");
  const room = longest - byId("plan-max").valueAsNumber;
  if (input.value !== input.defaultValue || room < 1 || parseTokens(input.value) <= room) return;
  const fits = 2 ** Math.floor(Math.log2(room));
  input.value = fits < 1024 ? `${fits}` : `${fits / 1024}K`;
}

async function showPlan(event) {
  event.preventDefault();
  byId("plan-send").disabled = true;
  showError("plan-error", "");
  try {
    drawPlan(await askJson("/v1/plan", { method: "POST", body: planBody(), signal: AbortSignal.timeout(120_000) }));
  } catch (error) {
    byId("plan-result").hidden = true;
    showError("plan-error", error.message);
  }
  byId("plan-send").disabled = false;
}

function drawPlan(plan) {
  const [word, kind] = VERDICTS[plan.verdict] ?? [plan.verdict, "idle"];
  byId("plan-result").hidden = false;
  setPill(byId("plan-verdict"), word, kind);
  const times = plan.concurrency > 1 ? `${formatCount(plan.concurrency)} × ` : "";
  setText(byId("plan-summary"), `${times}${formatCount(plan.tokens)} tokens, answer included`);
  const inside = Math.min(plan.needed_bytes, plan.pool_bytes);
  setBar(byId("plan-bar"), [["computed", inside], ["over", plan.needed_bytes - inside]], Math.max(plan.needed_bytes, plan.pool_bytes));
  const share = `needs ${formatBytes(plan.needed_bytes)} of a pool of ${formatBytes(plan.pool_bytes)}`;
  byId("plan-bar").setAttribute("aria-label", share);
  const seconds = plan.seconds && [plan.seconds.low, plan.seconds.high].map(formatSeconds);
  const figures = [
    ["pool needed", `${formatBytes(plan.needed_bytes)} of ${formatBytes(plan.pool_bytes)}`],
    ["keys and values", formatBytes(plan.kv_bytes + plan.scale_bytes)],
    ["peak memory", formatBytes(plan.peak_bytes)],
    ["reading, if nothing is cached", seconds ? [...new Set(seconds)].join(" to ") : "unknown"],
    ["steps", `${formatCount(plan.num_chunks)}`],
    ["of this length at once", formatCount(plan.requests_that_fit)],
  ];
  byId("plan-figures").replaceChildren(...figures.map(([name, value]) => {
    const row = make("div");
    row.append(make("dt", "", name), make("dd", "", value));
    return row;
  }));
  byId("plan-remedy").hidden = !plan.remedy;
  setText(byId("plan-remedy"), plan.remedy ?? "");
}

function choosePlanKind() {
  const byPrompt = chosen("plan-kind") === "prompt";
  byId("plan-prompt-field").hidden = !byPrompt;
  byId("plan-tokens-field").hidden = byId("plan-tokens-help").hidden = byPrompt;
  byId("plan-tokens").required = !byPrompt;
  byId("plan-prompt").required = byPrompt;
}
