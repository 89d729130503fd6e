// What runs and what waits.
const PATH_WORDS = { chat: "chat", completions: "completion", responses: "response" };
const paces = new Map();

function nameOf(record) {
  return `${PATH_WORDS[record.endpoint] ?? record.endpoint} ${shortId(record.id)}`;
}

function showRequests(records, now) {
  const live = records.filter((record) => record.stage !== "finished").reverse();
  const queued = live.filter((record) => record.stage === "queued").sort((a, b) => (a.queue_position ?? 1e9) - (b.queue_position ?? 1e9));
  const running = live.filter((record) => record.stage !== "queued");
  const focused = document.activeElement.closest("#running [data-key]")?.dataset.key;
  reconcile(byId("runs"), running, (record) => record.id, makeRun, (element, record) => updateRun(element, record, now));
  byId("runs-empty").hidden = running.length > 0 || !byId("loading").hidden;
  setText(byId("running-count"), running.length ? formatCount(running.length) : "");
  byId("queue-box").hidden = !queued.length;
  setText(byId("queue-count"), queued.length ? formatCount(queued.length) : "");
  reconcile(byId("queue"), queued, (record) => record.id, makeQueued, updateQueued);
  if (focused && document.activeElement === document.body) keepFocus(focused);
  for (const id of paces.keys()) if (!live.some((record) => record.id === id)) paces.delete(id);
  showLast(records.filter((record) => record.stage === "finished").slice(0, SHOWN_LAST));
  const first = running.find((record) => record.stage === "prefill");
  document.title = first ? `${formatProgress(first.processed, first.total)} · longctx` : "longctx";
}

// The row that had the focus went from the queue to what runs, or ended.
function keepFocus(key) {
  const rows = [...document.querySelectorAll("#running [data-key]")];
  (rows.find((row) => row.dataset.key === key)?.querySelector("button") ?? byId("running")).focus();
}

function cancelButton(record) {
  const button = make("button", "quiet", "Cancel");
  button.type = "button";
  button.setAttribute("aria-label", `Cancel ${nameOf(record)}`);
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      await ask(`/v1/requests/${encodeURIComponent(record.id)}`, { method: "DELETE" });
      announce(`${nameOf(record)} cancelled`);
    } catch (error) {
      button.disabled = false;
      announce(`Not cancelled: ${error.message}`);
    }
    wake();
  });
  return button;
}

function makeRun(record) {
  const element = makeProgress("li");
  setText(part(element, "what"), PATH_WORDS[record.endpoint] ?? record.endpoint);
  setText(part(element, "id"), shortId(record.id));
  element.querySelector(".request-head").append(cancelButton(record));
  paces.set(record.id, { read: new Pace(), write: new Pace() });
  return element;
}

function updateRun(element, record, now) {
  const pace = paces.get(record.id);
  pace.read.add(record.processed - record.cache, now);
  pace.write.add(record.generated, now);
  showProgress(element, nameOf(record), {
    ...record, seconds: record.time_ms / 1e3, etaSeconds: record.eta_ms == null ? null : record.eta_ms / 1e3,
    position: null, readRate: pace.read.rate(now), writeRate: pace.write.rate(now),
  });
}

function makeQueued(record) {
  const element = make("li", "waiting-request");
  const what = make("span", "request-what");
  what.append(make("span", "", PATH_WORDS[record.endpoint] ?? record.endpoint), make("code", "muted", shortId(record.id)));
  element.append(named(make("b"), "place"), what, named(make("span", "muted"), "facts"), cancelButton(record));
  return element;
}

function updateQueued(element, record) {
  setText(part(element, "place"), record.queue_position == null ? "…" : `${record.queue_position}.`);
  const eta = record.eta_ms == null ? "" : `, read in about ${formatAbout(record.eta_ms / 1e3)}`;
  setText(part(element, "facts"), `${formatCount(record.total)} tokens, waiting ${formatAbout(Math.floor(record.time_ms / 1e3))}${eta}`);
}
