// The few verbs that change the document. What comes from a server is only ever set as text.
function byId(id) {
  return document.getElementById(id);
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// Writing only what changed keeps selections, transitions and screen readers undisturbed.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

function setPill(element, text, kind) {
  setText(element, text);
  setAttribute(element, "data-kind", kind);
}

function setFacts(element, facts) {
  const texts = facts.filter(Boolean);
  while (element.children.length > texts.length) element.lastChild.remove();
  texts.forEach((text, index) => setText(element.children[index] ?? element.appendChild(make("span")), text));
}

// A bar of named parts, each a share of `whole`.
function setBar(bar, parts, whole) {
  parts.forEach(([name, size], index) => {
    const part = bar.children[index] ?? bar.appendChild(make("i"));
    setAttribute(part, "class", name);
    const width = `${whole > 0 ? (100 * Math.min(size, whole)) / whole : 0}%`;
    if (part.style.width !== width) part.style.width = width;
  });
}

// Makes the children of `list` those of `items`, in order; one element per key lives as long as its item.
function reconcile(list, items, keyOf, create, update) {
  const old = new Map([...list.children].map((element) => [element.dataset.key, element]));
  let place = list.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let element = old.get(key);
    if (!element) {
      element = create(item);
      element.dataset.key = key;
    }
    old.delete(key);
    if (element === place) place = place.nextElementSibling;
    else list.insertBefore(element, place);
    update(element, item);
  }
  for (const element of old.values()) element.remove();
}

function part(element, name) {
  return element.querySelector(`[data-part="${name}"]`);
}

function named(element, name) {
  element.dataset.part = name;
  return element;
}

let announced = "";
function announce(text) {
  if (text !== announced) byId("announcer").textContent = announced = text;
}

// One request on its way: the head line, the bar, the facts. Used for what runs and for the prompt being tried.
function makeProgress(tag) {
  const element = make(tag, "request");
  const head = make("div", "request-head");
  const what = make("span", "request-what");
  what.append(named(make("b"), "what"), named(make("code", "muted"), "id"), named(make("span", "muted"), "stage"));
  head.append(named(make("span", "figure"), "figure"), what, named(make("span", "request-left"), "left"));
  const bar = named(make("div", "bar"), "bar");
  bar.setAttribute("role", "progressbar");
  bar.setAttribute("aria-valuemin", "0");
  bar.setAttribute("aria-valuemax", "100");
  element.append(head, bar, named(make("div", "facts"), "facts"));
  return element;
}

// `state`: stage, total, cache, processed, generated, seconds, etaSeconds, position, readRate, writeRate, over.
function showProgress(element, label, state) {
  const { total, cache, processed } = state;
  const reading = state.stage === "prefill" || state.stage === "queued";
  const percent = total ? Math.floor((100 * processed) / total) : 0;
  const stage = STAGE_WORDS[state.stage] ?? state.stage;
  const writing = state.stage === "decode";
  const figure = state.stage === "tokenizing" ? "…" : writing ? formatCount(state.generated) : formatProgress(processed, total);
  setText(part(element, "figure"), figure);
  setAttribute(part(element, "figure"), "data-unit", writing ? "tokens" : "");
  setText(part(element, "stage"), state.position ? `${stage}, number ${state.position}` : stage);
  setText(part(element, "left"), reading && state.etaSeconds != null ? `${formatAbout(state.etaSeconds)} left` : "");
  const bar = part(element, "bar");
  bar.classList.toggle("waiting", state.stage === "tokenizing" || (state.stage === "queued" && !processed));
  setBar(bar, [["cached", cache], ["computed", Math.max(0, processed - cache)]], total);
  setAttribute(bar, "aria-label", `${label}: prompt read`);
  setAttribute(bar, "aria-valuenow", percent);
  setAttribute(bar, "aria-valuetext", `${percent} %, ${stage}`);
  setFacts(part(element, "facts"), [
    !total ? "" : processed < total ? `${formatCount(processed)} of ${formatCount(total)} tokens` : `${formatCount(total)} tokens read`,
    cache ? `${formatCount(cache)} from cache` : "",
    reading && state.readRate ? `${formatRate(state.readRate)} tokens/s` : "",
    state.generated && !writing ? `${formatCount(state.generated)} written` : "",
    state.generated && state.writeRate ? `${formatRate(state.writeRate)} tokens/s` : "",
    state.over ? `${formatSeconds(state.seconds)} in all` : `${formatAbout(Math.floor(state.seconds))} so far`,
  ]);
}

const STAGE_WORDS = { tokenizing: "tokenizing", queued: "queued", prefill: "reading", decode: "writing", finished: "done" };

function chosen(name) {
  return document.querySelector(`input[name="${name}"]:checked`).value;
}

function showError(id, text) {
  byId(id).hidden = !text;
  setText(byId(id), text);
}
