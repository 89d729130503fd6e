"""Batches on whole engines: answers as the server gives them, each alone the same; ends of every kind, and going on."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

import longctx.runner
import longctx.server.batch
from longctx.engine import Engine
from longctx.errors import EngineError, LongctxError
from longctx.loop import EngineLoop
from longctx.sampler import SamplingError
from longctx.server.batch import AHEAD, Batch, Counts
from longctx.server.batch_file import RequestFile, ResultFile
from tests.helpers.engine import generate, make_engine
from tests.helpers.server import CHAT_TEMPLATE, save_tiny
from tests.helpers.tiny import make_tiny
from tests.helpers.tokenizers import byte_level_tokenizer

WORDS = "the quick brown fox jumps over the lazy dog and the key is 4711 "
MAX_RUNNING = 3


@pytest.fixture
def engine() -> Iterator[Engine]:
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    engine = make_engine(make_tiny("llama", peaky=True), tokenizer=tokenizer, max_running=MAX_RUNNING, vocab_limit=301)
    yield engine
    for stats in engine.cache_stats():
        assert stats.held == 0, "every request has ended"


def completion(prompt: Any, max_tokens: int = 6, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"url": "/v1/completions", "body": {**body, **fields}}


def chat(text: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    return {"url": "/v1/chat/completions", "body": {**body, **fields}}


class Files:
    """A batch's two files in a folder."""

    def __init__(self, folder: Path, requests: dict[str, dict[str, Any]]):
        self.out = folder / "out.jsonl"
        self._requests = folder / "in.jsonl"
        lines = [{"custom_id": name, "method": "POST", **fields} for name, fields in requests.items()]
        self._requests.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(self, engine: Engine, act: Any = None) -> Counts:
        """Run what has no result yet. `act(batch, counts)` hears of all progress."""
        requests = RequestFile(str(self._requests), "tiny")
        results = ResultFile(str(self.out), requests)
        loop = EngineLoop(engine)
        batch = Batch(engine, loop, "tiny", requests, results, lambda counts: act and act(batch, counts))
        try:
            return batch.run()
        finally:
            abandoned = [r for running in batch._running for r in running.requests if not r.cancelled]
            loop.stop()
            assert not abandoned
            results.close()
            requests.close()

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    @property
    def bodies(self) -> dict[str, Any]:
        return {r["custom_id"]: r["response"]["body"] for r in self.results}


def test_every_endpoint_answers_as_the_server_does(engine: Engine, tmp_path: Path) -> None:
    files = Files(
        tmp_path,
        {
            "text": completion(WORDS, model="tiny"),
            "chat": chat("hello", n=2, logprobs=True, top_logprobs=2),
            "response": {"url": "/v1/responses", "body": {"input": "hi", "max_output_tokens": 4, "ignore_eos": True}},
            "echo": completion("the key", echo=True, logprobs=1),
            "prompt": completion("the key", prompt_logprobs=2),
            "lists": completion(["a", "the fox"]),
        },
    )
    counts = files.run(engine)
    assert (counts.answered, counts.failed, counts.running) == (6, 0, 0)
    assert all(r["error"] is None and r["response"]["status_code"] == 200 for r in files.results)
    bodies = files.bodies
    for name in ("text", "prompt", "lists"):
        Completion.model_validate(bodies[name])
    answer = ChatCompletion.model_validate(bodies["chat"])
    assert len(answer.choices) == 2 and answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert Response.model_validate(bodies["response"]).usage.output_tokens == 4
    assert bodies["echo"]["choices"][0]["text"].startswith("the key")
    assert bodies["echo"]["choices"][0]["logprobs"]["token_logprobs"][0] is None
    rows = bodies["prompt"]["choices"][0]["prompt_logprobs"]
    assert rows[0] is None and len(rows) == bodies["prompt"]["usage"]["prompt_tokens"]
    assert [c["index"] for c in bodies["lists"]["choices"]] == [0, 1]
    total = sum(body["usage"].get("completion_tokens", 4) for body in bodies.values())
    assert counts.completion_tokens == counts.generated == total


def test_answers_are_those_of_each_request_alone(engine: Engine, tmp_path: Path) -> None:
    prompts = {f"r{i}": WORDS * (1 + i % 4) + str(i) for i in range(12)}
    files = Files(tmp_path, {name: completion(prompt) for name, prompt in prompts.items()})
    most_running, most_open = 0, 0

    def watch(batch: Batch, counts: Counts) -> None:
        nonlocal most_running, most_open
        most_running = max(most_running, len(engine.scheduler.running))
        most_open = max(most_open, counts.running)
        assert counts.written + counts.running <= counts.total

    counts = files.run(engine, watch)
    assert counts.answered == 12 and most_open == AHEAD * MAX_RUNNING and most_running == MAX_RUNNING
    assert 0 < counts.cached_tokens < counts.prompt_tokens <= counts.read
    alone = make_engine(make_tiny("llama", peaky=True), tokenizer=engine.loaded.tokenizer, vocab_limit=301)
    for name, body in files.bodies.items():
        ids = engine.loaded.tokenizer(prompts[name])["input_ids"]
        assert body["choices"][0]["text"] == generate(alone, ids, 6, ignore_eos=True).text


def test_bad_requests_have_results_too(engine: Engine, tmp_path: Path) -> None:
    files = Files(
        tmp_path,
        {
            "model": completion("x", model="gpt-5"),
            "long": completion("x", 100_000),
            "longer": completion(WORDS * 1000),
            "range": completion("x", top_p=5),
            "field": completion("x", tempereture=1),
            "bias": completion("x", logit_bias={"310": 1.0}),
            "good": completion("x"),
            "get": {**completion("x"), "method": "GET"},
        },
    )
    counts = files.run(engine)
    assert (counts.answered, counts.failed) == (1, 7)
    by_id = {r["custom_id"]: r for r in files.results}
    status = {name: r["response"]["status_code"] for name, r in by_id.items() if name is not None}
    assert status == {"model": 404, "long": 400, "longer": 400, "range": 400, "field": 400, "bias": 400, "good": 200}
    assert by_id["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert "logit_bias names token id 310" in by_id["bias"]["response"]["body"]["error"]["message"]
    assert by_id[None]["response"] is None and "line 8: its method" in by_id[None]["error"]["message"]


def test_what_has_no_effect_in_a_batch_is_said(engine: Engine, tmp_path: Path) -> None:
    files = Files(tmp_path, {"a": chat("x", stream=True, timeout_s=5, stream_options={"include_usage": True})})
    files.run(engine)
    body = files.bodies["a"]
    assert body["object"] == "chat.completion"
    assert body["warnings"] == ["stream has no effect in a batch", "timeout_s has no effect in a batch"]


def test_a_batch_that_was_interrupted_goes_on(engine: Engine, tmp_path: Path) -> None:
    """What was running has no result and nothing is left of it; run again, every request has exactly one."""
    files = Files(tmp_path, {f"r{i}": completion(WORDS + str(i), 4 if i < 4 else 40) for i in range(10)})
    counts = files.run(engine, lambda batch, counts: batch.cancel() if counts.answered >= 2 else None)
    first = files.out.read_bytes()
    assert 2 <= counts.written < 10 and counts.running == 0 and not engine.has_work
    counts = files.run(engine)
    assert counts.skipped == first.count(b"\n") and counts.written == 10 - counts.skipped
    assert files.out.read_bytes().startswith(first)
    assert sorted(files.bodies) == sorted(f"r{i}" for i in range(10)) and len(files.results) == 10
    assert files.run(engine) == Counts(0, skipped=10)


def test_a_cancellation_between_two_requests_is_not_lost(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while a request is being prepared: it must not run to its end of a thousand tokens."""
    files = Files(tmp_path, {f"r{i}": completion(str(i), 1000) for i in range(3)})
    batches: list[Batch] = []
    start = Batch._start

    def interrupted(self: Batch, *args: Any) -> None:
        if len(self._running) == 1:
            self.cancel()
        batches.append(self)
        start(self, *args)

    monkeypatch.setattr(Batch, "_start", interrupted)
    counts = files.run(engine)
    assert counts.written == 0 and len(batches) == 2 and counts.generated < 1000


def test_a_step_that_fails_costs_its_requests_only(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = longctx.runner.sample_rows

    def sample_badly(logits: Any, rows: Any, limit: int) -> Any:
        tokens = sample(logits, rows, limit)
        return [SamplingError("no token") if r.seed == 13 else t for t, r in zip(tokens, rows, strict=True)]

    monkeypatch.setattr(longctx.runner, "sample_rows", sample_badly)
    files = Files(tmp_path, {f"r{i}": completion(WORDS, n=2, seed=13 if i == 1 else 1) for i in range(3)})
    counts = files.run(engine)
    assert (counts.answered, counts.failed) == (2, 1)
    [failed] = [r for r in files.results if r["response"]["status_code"] != 200]
    assert failed["custom_id"] == "r1" and failed["response"]["status_code"] == 500
    assert failed["response"]["body"]["error"]["message"] == "no token"


def test_a_mistake_of_ours_costs_one_request(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = longctx.server.batch.prepare

    def trip(endpoint: str, body: bytes, *rest: Any) -> Any:
        if b"trip" in body:
            raise KeyError("over")
        return prepare(endpoint, body, *rest)

    monkeypatch.setattr(longctx.server.batch, "prepare", trip)
    files = Files(tmp_path, {"a": completion("trip"), "b": completion("x")})
    assert files.run(engine).answered == 1
    assert {r["custom_id"]: r["response"]["status_code"] for r in files.results} == {"a": 500, "b": 200}


def test_an_engine_that_breaks_leaves_what_was_answered(engine: Engine, tmp_path: Path) -> None:
    files = Files(tmp_path, {f"r{i}": completion(str(i), 2 + 30 * (i > 1)) for i in range(5)})
    scheduler, commit = engine.scheduler, engine.scheduler.commit

    def act(batch: Batch, counts: Counts) -> None:
        if counts.answered:
            scheduler.commit = None  # type: ignore[assignment, method-assign]

    with pytest.raises(EngineError, match="the engine has stopped"):
        files.run(engine, act)
    answered = len(files.results)
    assert 1 <= answered < 5
    scheduler.commit = commit  # type: ignore[method-assign]
    for request in scheduler.requests():
        engine.cancel(request.id)
    engine.step()
    assert files.run(engine).written == 5 - answered


def test_results_that_cannot_be_written_end_the_batch(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: ResultFile, result: Any) -> None:
        raise LongctxError("--out: No space left on device")

    monkeypatch.setattr(ResultFile, "append", full)
    files = Files(tmp_path, {f"r{i}": completion(str(i), 3 + 1000 * (i > 0)) for i in range(3)})
    with pytest.raises(LongctxError, match="No space left"):
        files.run(engine)
    assert not engine.has_work


@pytest.mark.slow
def test_kill_9_in_the_middle_loses_no_request_and_answers_none_twice(tmp_path: Path) -> None:
    """`longctx run --batch` as a process, killed after some results, interrupted once more, then left to finish."""
    folder = save_tiny(tmp_path / "tiny")
    count = 40
    files = Files(tmp_path, {f"r{i}": completion(WORDS + str(i), 60) for i in range(count)})
    code = "import sys; from longctx.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "run", str(folder), "--batch", str(tmp_path / "in.jsonl")]
    command += ["--out", str(files.out), "--kv-memory", "16MiB", "--json"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "LONGCTX_CACHE": str(tmp_path / "cache")}

    def started_until(results: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 120
        while not files.out.exists() or files.out.read_bytes().count(b"\n") < results:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)
        return process

    process = started_until(4)
    process.kill()
    process.communicate()
    killed_at = files.out.read_bytes().count(b"\n")
    assert killed_at < count
    process = started_until(killed_at + 4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on" in err, err
    assert json.loads(out)["skipped"] == killed_at
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(r["custom_id"] for r in files.results) == sorted(f"r{i}" for i in range(count))
    assert all(len(body["choices"][0]["text"]) > 0 for body in files.bodies.values())
