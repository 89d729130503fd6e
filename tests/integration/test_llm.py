"""The Python API from many threads, at its end, and after it: every caller hears how its request ended."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

import longctx.runner
from longctx.errors import EngineError, LongctxError, QueueFullError, RequestError
from longctx.events import FinishEvent, ProgressEvent, TokenEvent
from longctx.llm import LLM, GenerationError
from longctx.loop import PROGRESS_INTERVAL_MS, EngineLoop, Subscription
from longctx.params import SamplingParams
from longctx.sampler import SamplingError
from tests.helpers.engine import make_engine
from tests.helpers.tiny import make_tiny, random_ids

LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_tiny("llama").save_pretrained(path)
    return str(path)


@pytest.fixture
def llm(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path))
    with LLM(folder, kv_memory="8MiB", block_tokens=16, max_chunk_tokens=256, max_running=2) as llm:
        yield llm


def in_thread(target, *args):
    """Run it beside us; answers what waits for its result and fails if it takes too long."""
    result = []

    def run():
        try:
            result.append(target(*args))
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait():
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a caller still waits"
        return result[0]

    return wait


def idle(llm: LLM) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while busy := llm.engine.has_work or bool(llm._loop._open):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return not busy


def test_closing_ends_every_open_request(llm) -> None:
    """Running, queued and not yet taken: each caller gets its finish event, and later calls a clear error."""
    waiting = [in_thread(llm.generate, [random_ids(20, seed=i)], LONG) for i in range(5)]
    while not llm.engine.scheduler.running:
        time.sleep(0.01)
    llm.close()
    for wait in waiting:
        answer = wait()
        assert isinstance(answer, LongctxError) or answer[0].finish_reason == "cancelled"
    llm.close()
    for call in (lambda: llm.generate([5, 6]), lambda: llm.score([5, 6]), lambda: next(llm.stream([5, 6]))):
        with pytest.raises(LongctxError, match="closed"):
            call()
    assert not llm.cancel("nobody")


def test_a_request_can_be_cancelled_before_the_engine_has_seen_it(llm) -> None:
    """Cancelling is never too early: right after `start` the request may still lie in the inbox."""
    for _ in range(20):
        subscription = llm.start(random_ids(10), LONG)
        assert llm.cancel(subscription.request.id)
        *_, last = subscription
        assert last.reason == "cancelled"
        assert not llm.cancel(subscription.request)


def test_a_stream_that_is_closed_or_forgotten_is_cancelled(llm) -> None:
    stream = llm.stream(random_ids(10), LONG)
    next(e for e in stream if isinstance(e, TokenEvent))
    stream.close()
    forgotten = llm.stream(random_ids(10), LONG)
    next(forgotten)
    del stream, forgotten
    gc.collect()
    assert idle(llm)


def test_an_engine_that_breaks_tells_everybody() -> None:
    """Running, queued, still in the inbox, and whoever comes later: an error, and nobody waits for ever."""
    engine = make_engine(make_tiny("llama"), max_running=1)
    inside, broken = threading.Event(), threading.Event()

    def break_down(*_):
        inside.set()
        broken.wait(PATIENCE_S)
        raise AssertionError("out of order")

    engine.scheduler.commit = break_down
    loop = EngineLoop(engine)
    waiting = [in_thread(list, loop.submit(engine.make_request(random_ids(10), SHORT))) for _ in range(2)]
    assert inside.wait(PATIENCE_S)
    waiting.append(in_thread(list, loop.submit(engine.make_request(random_ids(10), SHORT))))
    broken.set()
    for wait in waiting:
        assert isinstance(answer := wait(), EngineError) and "out of order" in str(answer)
    with pytest.raises(EngineError, match="out of order"):
        loop.submit(engine.make_request(random_ids(10), SHORT))
    loop.stop()


def test_the_engines_own_thread_may_close_it() -> None:
    """A garbage collection in the engine's thread closes it: that thread cannot wait for itself."""
    engine = make_engine(make_tiny("llama"))
    loop = EngineLoop(engine)
    failed = []

    def close(step, fraction):
        try:
            with loop._lock:
                loop.stop()
        except RuntimeError as error:
            failed.append(error)

    engine._on_layer = close
    *_, last = loop.submit(engine.make_request(random_ids(10), LONG))
    assert last.reason == "cancelled" and not failed
    loop.stop()


def test_callers_in_many_threads_get_their_own_answers(llm) -> None:
    """Generating, streaming and cancelling at the same time: every answer is what the prompt gives alone."""
    prompts = [random_ids(5 + 7 * i, seed=i) for i in range(6)]
    expected = [o.token_ids for o in llm.generate(prompts, SHORT)]

    def client(k: int) -> None:
        for i in range(12):
            j = (i + k) % len(prompts)
            if i % 3 == 0:
                assert llm.generate([prompts[j]], SHORT)[0].token_ids == expected[j]
            elif i % 3 == 1:
                *_, last = llm.stream(prompts[j], SHORT)
                assert last.token_ids == expected[j]
            else:
                subscription = llm.start(prompts[j], LONG)
                llm.cancel(subscription.request)
                *_, last = subscription
                assert isinstance(last, FinishEvent) and last.reason == "cancelled"

    for wait in [in_thread(client, k) for k in range(3)]:
        assert wait() is None
    assert idle(llm)


def test_one_prompt_or_many(llm) -> None:
    """A flat list of ids is one prompt, of any number type; what would have to be guessed is refused."""
    ids = random_ids(6)
    [alone] = llm.generate(ids, SHORT)
    for same in (tuple(ids), np.array(ids), torch.tensor(ids), [np.int32(t) for t in ids], [ids], np.array([ids])):
        [out] = llm.generate(same, SHORT)
        assert out.token_ids == alone.token_ids
    assert [o.token_ids for o in llm.generate(torch.tensor([ids, ids]), SHORT)] == [alone.token_ids] * 2
    assert llm.generate([]) == []
    for bad in ([1.5, 2.5], [[1.5]], [["5"]], 7, None, [None], {"role": "user"}, b"text", [[]], [ids, []], [[[1]]]):
        with pytest.raises(RequestError):
            llm.generate(bad, SHORT)
    assert idle(llm)


def test_more_prompts_than_the_queue_holds(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path))
    with LLM(folder, kv_memory="8MiB", block_tokens=16, max_chunk_tokens=256, max_running=2, max_queue=3) as llm:
        assert len(llm.generate([random_ids(4, seed=i) for i in range(9)], SHORT)) == 9


def test_a_queue_that_others_fill_is_waited_for(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path))
    with LLM(folder, kv_memory="8MiB", block_tokens=16, max_chunk_tokens=256, max_running=1, max_queue=2) as llm:
        others = [llm.start(random_ids(9, seed=i), LONG) for i in range(2)]
        while True:
            with suppress(QueueFullError):
                others.append(llm.start(random_ids(9), LONG))
                continue
            break
        wait = in_thread(llm.generate, [random_ids(4, seed=i) for i in range(3)], SHORT)
        for other in others:
            llm.cancel(other.request)
        assert [len(output.token_ids) for output in wait()] == [2, 2, 2]


def test_failures_come_with_the_outputs_of_the_others(llm, monkeypatch) -> None:
    """One prompt's logits are no numbers: the others are finished and handed over, and nothing is passed over."""
    prompts = [random_ids(8, seed=i) for i in range(4)]
    expected = llm.generate(prompts, SHORT)
    sample = longctx.runner.sample_rows

    def sample_badly(logits, rows, limit):
        tokens = sample(logits, rows, limit)
        return [SamplingError("no token") if row.seed == 13 else t for t, row in zip(tokens, rows, strict=True)]

    monkeypatch.setattr(longctx.runner, "sample_rows", sample_badly)
    params = [replace(SHORT, seed=13 if i in (1, 2) else 0) for i in range(4)]
    with pytest.raises(GenerationError, match="2 of 4 prompts failed, first number 2: no token") as caught:
        llm.generate(prompts, params)
    outputs = caught.value.outputs
    assert [output.error for output in outputs] == [None, "no token", "no token", None]
    assert [output.finish_reason for output in outputs] == ["length", "error", "error", "length"]
    assert [outputs[i].token_ids for i in (0, 3)] == [expected[i].token_ids for i in (0, 3)]
    assert pickle.loads(pickle.dumps(caught.value)).outputs == outputs
    with pytest.raises(GenerationError, match=r"^no token$"):
        llm.generate(prompts[1], params[1])
    assert idle(llm)


def test_an_engine_that_breaks_leaves_what_was_finished(llm, monkeypatch) -> None:
    commit = llm.engine.scheduler.commit

    def break_down(step, results):
        events = commit(step, results)
        if any(isinstance(e, FinishEvent) for e in events):
            llm.engine.scheduler.commit = None
        return events

    monkeypatch.setattr(llm.engine.scheduler, "commit", break_down)
    params = [replace(SHORT, max_tokens=n) for n in (1, 50)]
    with pytest.raises(
        GenerationError, match="1 of 2 prompts failed, first number 2: the engine has stopped"
    ) as caught:
        llm.generate([random_ids(8), random_ids(9)], params)
    assert [len(output.token_ids) for output in caught.value.outputs] == [1, 0]


def test_outputs_carry_the_logprobs_that_were_asked_for(llm) -> None:
    ids = random_ids(30)
    [plain] = llm.generate(ids, SHORT)
    [output] = llm.generate(ids, replace(SHORT, logprobs=2, prompt_logprobs=0))
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)
    assert output.token_ids == plain.token_ids and len(output.logprobs) == 2
    assert [row.top_ids[0] for row in output.logprobs] == list(output.token_ids)
    scores = llm.score(ids).logprobs
    assert [row and row.logprob for row in output.prompt_logprobs] == scores


def test_a_caller_who_is_interrupted_leaves_nothing_running(llm, monkeypatch) -> None:
    """Ctrl-C while waiting: all prompts of the call are cancelled."""

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("longctx.llm._output", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([random_ids(10, seed=i) for i in range(4)], LONG)
    with pytest.raises(KeyboardInterrupt):
        llm.score(random_ids(1500))
    assert idle(llm)


def test_leaving_the_interpreter_in_the_middle_of_a_stream(folder, tmp_path) -> None:
    """No hang and no traceback when a program ends while the engine works and nobody closed it."""
    program = (
        "from longctx import LLM, SamplingParams\n"
        f"llm = LLM({folder!r}, kv_memory='8MiB', block_tokens=16, max_chunk_tokens=256, max_running=2)\n"
        "stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=2000, ignore_eos=True))\n"
        "print(next(stream).stage, flush=True)\n"
        "llm.start([5, 6, 8])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LONGCTX_CACHE": str(tmp_path)},
    )
    assert run.returncode == 0 and "Traceback" not in run.stderr and "Exception" not in run.stderr, run.stderr


def test_the_plan_of_a_prompt_and_its_answer_is_what_admission_asks(llm) -> None:
    tokens = llm.engine.partition.longest_request
    assert llm.plan(tokens - 5, max_tokens=5).verdict == "fits"
    assert llm.plan(np.int64(tokens - 5), max_tokens=6).verdict != "fits"
    llm.start(random_ids(tokens - 5), SamplingParams(max_tokens=5))
    with pytest.raises(RequestError):
        llm.start(random_ids(tokens - 5), SamplingParams(max_tokens=6))


def test_a_queued_request_does_not_bury_its_reader_in_events() -> None:
    """A request that was preempted while it decoded waits for many steps: its place is told now and then."""
    subscription = Subscription(make_engine(make_tiny("llama")).make_request([5], SHORT))
    for step in range(1000):
        subscription.put(ProgressEvent("r", "queued", 1, 0, 1, float(step), None, 1))
    assert subscription._events.qsize() <= 1000 / PROGRESS_INTERVAL_MS + 1


def test_a_new_stage_is_told_however_soon_it_comes() -> None:
    subscription = Subscription(make_engine(make_tiny("llama")).make_request([5], SHORT))
    stages = ["queued", "prefill", "prefill", "queued", "prefill"]
    for step, stage in enumerate(stages):
        subscription.put(ProgressEvent("r", stage, 9, 0, 1, float(step), None))
    told = [subscription._events.get().stage for _ in range(subscription._events.qsize())]
    assert told == ["queued", "prefill", "queued", "prefill"]
