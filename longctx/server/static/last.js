// What ran last, each with its cache report.
const END_WORDS = {
  stop: ["done", "good"], length: ["length", "good"], scored: ["scored", "good"], cancelled: ["cancelled", "warn"],
  error: ["failed", "bad"], refused: ["refused", "bad"],
};
let seenEnds = null;

function showLast(records) {
  byId("last-table").hidden = !records.length;
  byId("last-empty").hidden = records.length > 0;
  reconcile(byId("last-rows"), records, (record) => record.id, makeLast, () => {});
  if (seenEnds) {
    const ended = records.filter((record) => !seenEnds.has(record.id));
    if (ended.length) announce(ended.map(sayEnd).join(". "));
  }
  seenEnds = new Set(records.map((record) => record.id));
}

function sayEnd(record) {
  const cached = record.usage?.prompt_tokens_details.cached_tokens ?? 0;
  return `${nameOf(record)} ${endOf(record)[0]}, ${formatCount(cached)} of ${formatCount(record.total)} tokens from cache`;
}

function endOf(record) {
  if (END_WORDS[record.finish_reason]) return END_WORDS[record.finish_reason];
  return record.error ? END_WORDS.refused : [record.finish_reason ?? "ended", "idle"];
}

function cell(label, text, className = "number") {
  const element = make("td", text === "–" ? `${className} none` : className, text);
  element.dataset.label = label;
  return element;
}

// Its row is written once: nothing of a finished request changes.
function makeLast(record) {
  const row = make("tr");
  const request = make("td", "cell-request", PATH_WORDS[record.endpoint] ?? record.endpoint);
  const sub = `${formatClock(record.created)}, ${formatSeconds(record.time_ms / 1e3)} in all`;
  request.append(" ", make("code", "muted", shortId(record.id)), make("span", "sub", sub));
  const { usage, timings } = record;
  const answered = usage && usage.completion_tokens > 0;
  const rate = (value) => (value ? `${formatRate(value)} /s` : "–");
  const end = make("td", "cell-end");
  const pill = make("span", "pill");
  setPill(pill, ...endOf(record));
  end.append(pill);
  row.append(
    request,
    promptCell(record),
    cell("Computed", usage ? formatCount(usage.computed_tokens) : "–"),
    cell("First token", answered && timings ? formatSeconds(timings.ttft_ms / 1e3) : "–"),
    cell("Reading", rate(timings?.prefill_tokens_per_s)),
    cell("Writing", rate(timings?.decode_tokens_per_s)),
    cell("Answer", usage ? formatCount(usage.completion_tokens) : "–"),
    end,
  );
  // Laid out as a card it would be a table no more to a screen reader.
  row.setAttribute("role", "row");
  for (const each of row.children) each.setAttribute("role", "cell");
  return row;
}

function promptCell(record) {
  const element = make("td", "prompt-cell");
  const prompt = record.usage?.prompt_tokens ?? record.total;
  const cached = record.usage?.prompt_tokens_details.cached_tokens ?? record.cache;
  if (prompt) {
    const where = formatTiers(record.usage?.prompt_tokens_details.by_tier) || `${formatCount(cached)} from cache`;
    const bar = make("div", "bar small");
    setBar(bar, [["cached", cached], ["computed", Math.max(record.processed, cached) - cached]], prompt);
    element.append(`${formatCount(cached)} of ${formatCount(prompt)} cached`, bar);
    element.append(make("span", "sub", cached ? `${formatPercent(cached, prompt)}: ${where}` : "nothing from cache"));
  } else {
    element.append(make("span", "muted", "never read"));
  }
  if (record.error) element.append(make("span", "sub", record.error));
  return element;
}
