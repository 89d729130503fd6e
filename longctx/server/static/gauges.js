// KV memory by tier, and the pace.
const TIER_WORDS = { g1: "device", g2: "host", g3: "disk", g4: "remote" };
const total = { read: new Pace(), write: new Pace() };
const sparks = { read: new Spark("read"), write: new Spark("write") };
let sparkAt = 0;

function showTiers(samples) {
  const tiers = new Map();
  for (const { labels, value } of samples) tiers.set(labels.tier, { ...tiers.get(labels.tier), [labels.state]: value });
  const shown = [...tiers].sort().filter(([, sizes]) => sizes.held + sizes.cached + sizes.free > 0);
  byId("tiers-empty").hidden = shown.length > 0;
  reconcile(byId("tiers"), shown, ([name]) => name, makeTier, updateTier);
}

function makeTier([name]) {
  const element = make("li", "tier");
  const head = make("div", "tier-head");
  const title = make("span");
  title.append(make("b", "", name.toUpperCase()), ` ${TIER_WORDS[name] ?? ""}`);
  head.append(title, named(make("span", "muted"), "size"));
  const bar = named(make("div", "bar"), "bar");
  bar.setAttribute("role", "img");
  element.append(head, bar, named(make("div", "facts"), "facts"));
  return element;
}

function updateTier(element, [name, { held, cached, free }]) {
  const cap = held + cached + free;
  setText(part(element, "size"), formatBytes(cap));
  setBar(part(element, "bar"), [["computed", held], ["cached", cached]], cap);
  const texts = [["held", held], ["cached", cached], ["free", free]].map(([word, size]) => `${formatBytes(size)} ${word}`);
  setAttribute(part(element, "bar"), "aria-label", `${name.toUpperCase()}: ${texts.join(", ")}`);
  setFacts(part(element, "facts"), texts);
}

function showPace(samples, now) {
  const prefill = samples("longctx_prefill_tokens_total");
  const computed = sum(prefill.filter(({ labels }) => labels.source === "computed"));
  total.read.add(computed, now);
  total.write.add(sum(samples("longctx_decode_tokens_total")), now);
  for (const name of ["read", "write"]) setText(byId(`pace-${name}`), formatRate(total[name].rate(now)));
  if (now - sparkAt >= 1) {
    sparkAt = now;
    for (const name of ["read", "write"]) sparks[name].add(total[name].rate(now));
  }
  setText(byId("total-prompt"), formatCount(sum(prefill)));
  setText(byId("total-cached"), formatPercent(sum(prefill) - computed, sum(prefill)));
  setText(byId("total-requests"), formatCount(sum(samples("longctx_requests_total"))));
  showJobs(samples("longctx_jobs"));
  setText(byId("total-preempted"), formatCount(sum(samples("longctx_preemptions_total"))));
  setText(byId("total-restarts"), formatCount(sum(samples("longctx_engine_restarts_total"))));
}

function showJobs(samples) {
  const open = samples.filter(({ labels, value }) => value > 0 && ["running", "queued", "failed"].includes(labels.state));
  const words = open.map(({ labels, value }) => `${formatCount(value)} ${labels.state}`);
  setText(byId("total-jobs"), [formatCount(sum(samples)), ...words].join(", "));
}
