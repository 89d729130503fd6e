// The box that tries a prompt, with its progress, and can stop it.
let attempt = null;
let attached = null;

// A base model has no chat template: then the other kind is the one that works.
async function chooseKind() {
  try {
    await askJson("/tokenize", { method: "POST", body: { messages: [{ role: "user", content: "?" }] } });
  } catch (error) {
    if (error.code === "no_chat_template") {
      document.querySelector('input[name="try-kind"][value="completions"]').checked = true;
    }
  }
}

function tryBody() {
  const typed = byId("try-prompt").value;
  const text = attached ? `${attached.text}\n\n${typed}` : typed;
  const body = {
    model: modelName, stream: true, return_progress: true, stream_options: { include_usage: true },
    max_tokens: byId("try-max").valueAsNumber, temperature: byId("try-temperature").valueAsNumber,
  };
  if (chosen("try-kind") === "completions") return ["/v1/completions", { ...body, prompt: text }];
  return ["/v1/chat/completions", { ...body, messages: [{ role: "user", content: text }] }];
}

async function tryPrompt(event) {
  event.preventDefault();
  if (attempt) return;
  const [path, body] = tryBody();
  attempt = new AbortController();
  const run = new Try(chosen("try-kind"));
  try {
    for await (const object of askStream(path, body, attempt.signal)) run.take(object);
    run.end("done");
  } catch (error) {
    if (error.name === "AbortError") run.end("cancelled");
    else run.fail(error);
  }
  attempt = null;
  wake();
}

// One prompt being tried: its progress, its answer, its report.
class Try {
  constructor(kind) {
    this.label = PATH_WORDS[kind];
    this.begun = performance.now() / 1e3;
    this.pace = { read: new Pace(), write: new Pace() };
    this.state = { stage: "tokenizing", total: 0, cache: 0, processed: 0, generated: 0, etaSeconds: null, position: null };
    this.usage = this.timings = this.reason = null;
    this.text = document.createTextNode("");
    this.progress = byId("try-progress").firstElementChild ?? byId("try-progress").appendChild(makeProgress("div"));
    setText(part(this.progress, "what"), this.label);
    byId("try-answer").replaceChildren(this.text);
    byId("try-result").hidden = false;
    setText(byId("try-report"), "");
    showError("try-error", "");
    this.running(true);
    this.timer = setInterval(() => this.show(), 250);
    this.show();
  }

  running(active) {
    byId("try-send").hidden = active;
    byId("try-cancel").hidden = !active;
    byId("try-answer").setAttribute("aria-busy", active);
    // The button that had the focus has gone: its place is taken by the other.
    if (document.activeElement === document.body) byId(active ? "try-cancel" : "try-send").focus();
  }

  take(object) {
    const now = performance.now() / 1e3;
    const progress = object.prompt_progress;
    if (progress) {
      const { total, cache, processed, stage, eta_ms: eta, queue_position: position } = progress;
      const etaSeconds = eta == null ? null : eta / 1e3;
      Object.assign(this.state, { total, cache, processed, stage: stage ?? "prefill", etaSeconds, position });
      this.pace.read.add(processed - cache, now);
    }
    const [choice] = object.choices ?? [];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    if (text) {
      this.add(text);
      Object.assign(this.state, { stage: "decode", processed: this.state.total, generated: this.state.generated + 1 });
      this.pace.write.add(this.state.generated, now);
    }
    this.reason = choice?.finish_reason ?? this.reason;
    this.usage = object.usage ?? this.usage;
    this.timings = object.timings ?? this.timings;
  }

  add(text) {
    const box = byId("try-answer");
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    this.text.appendData(text);
    if (atEnd) box.scrollTop = box.scrollHeight;
  }

  show() {
    const now = performance.now() / 1e3;
    showProgress(this.progress, this.label, {
      ...this.state, seconds: now - this.begun, readRate: this.pace.read.rate(now), writeRate: this.pace.write.rate(now),
    });
  }

  end(word) {
    clearInterval(this.timer);
    Object.assign(this.state, { stage: word, over: true });
    if (this.usage) this.state.generated = this.usage.completion_tokens;
    this.show();
    this.running(false);
    setText(byId("try-report"), this.report(word));
  }

  fail(error) {
    this.end("failed");
    const known = error instanceof ServerError;
    showError("try-error", known ? error.message : "The connection was lost before the answer was done.");
    if (error.code === "no_chat_template") chooseKind();
  }

  report(word) {
    if (!this.usage) return word === "cancelled" ? "Cancelled: the server stopped working on it." : "";
    const { prompt_tokens: prompt, completion_tokens: answer, prompt_tokens_details: details } = this.usage;
    const cached = details?.cached_tokens ?? 0;
    const { ttft_ms: ttft, prefill_tokens_per_s: reading, decode_tokens_per_s: writing } = this.timings ?? {};
    return [
      `${formatCount(cached)} of ${formatCount(prompt)} prompt tokens from cache${cached ? ` (${formatTiers(details.by_tier)})` : ""}`,
      ttft ? `first token after ${formatSeconds(ttft / 1e3)}` : "",
      reading ? `reading ${formatRate(reading)} tokens/s` : "",
      `${formatCount(answer)} written${writing ? ` at ${formatRate(writing)} tokens/s` : ""}`,
      this.reason === "length" ? "ended by the limit of answer tokens" : "",
    ].filter(Boolean).join(" · ");
  }
}

async function attach(file) {
  if (!file) return;
  attached = { name: file.name, text: await file.text() };
  setText(byId("document-name"), attached.name);
  setText(byId("document-size"), formatBytes(file.size));
  byId("document").hidden = false;
  byId("try-prompt").focus();
}

function detach() {
  attached = null;
  byId("try-file").value = "";
  byId("document").hidden = true;
  byId("try-prompt").focus();
}
