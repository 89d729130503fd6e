// Everything the page asks of its server.
const KEY_NAME = "longctx-api-key";
const ANSWER_WITHIN_MS = 8000;

class ServerError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.code = error?.code ?? null;
  }
}

function apiKey() {
  return sessionStorage.getItem(KEY_NAME) ?? "";
}

function headers(extra = {}) {
  return apiKey() ? { Authorization: `Bearer ${apiKey()}`, ...extra } : extra;
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  return new ServerError(response.status, body?.error);
}

async function ask(path, { method = "GET", body, accept = [200], signal = AbortSignal.timeout(ANSWER_WITHIN_MS) } = {}) {
  const response = await fetch(path, {
    method,
    signal,
    cache: "no-store",
    headers: headers(body === undefined ? {} : { "Content-Type": "application/json" }),
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!accept.includes(response.status)) throw await failure(response);
  return response;
}

async function askJson(path, options) {
  return (await ask(path, options)).json();
}

// Yields the objects of a stream of server-sent events. Comments (the server's pings) are skipped.
async function* askStream(path, body, signal) {
  const response = await ask(path, { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream ended early");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const object = JSON.parse(data);
      if (object.error) throw new ServerError(response.status, object.error);
      yield object;
    }
  }
}

// Prometheus text as a function: samples("name") is a list of {labels, value}.
function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return (name) => found.get(name) ?? [];
}

function sum(samples) {
  return samples.reduce((total, sample) => total + sample.value, 0);
}
