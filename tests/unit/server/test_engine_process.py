"""The engine's side of the pipe, in this process: what it answers, when, and that its engine never waits for it."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import longctx.server.engine_process
from longctx.config import EngineConfig
from longctx.errors import EngineError, ModelError, QueueFullError
from longctx.events import FinishEvent, ProgressEvent, TokenEvent
from longctx.params import SamplingParams
from longctx.server.engine_process import EngineServer, LoadingReports, model_info
from longctx.server.messages import (
    Accepted,
    Answer,
    Broken,
    Cancel,
    EngineStats,
    Happened,
    Loading,
    Query,
    Ready,
    Refused,
    Stop,
    Submit,
)
from longctx.server.outbox import Outbox
from tests.helpers.engine import generate, make_engine
from tests.helpers.tiny import make_tiny, random_ids

PATIENCE_S = 30.0
CONFIG = EngineConfig.from_options("tiny")


class Served:
    """A server in a thread and the other end of its pipe; `received` grows by what it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, build: Any):
        monkeypatch.setattr(longctx.server.engine_process, "build_engine", build)
        self.left = threading.Event()
        monkeypatch.setattr(longctx.server.engine_process, "_leave", self._leave)
        self._connection, theirs = multiprocessing.Pipe()
        self._theirs = theirs
        self.received: list[Any] = []
        self.code: int | None = None
        server = EngineServer(theirs, Outbox(theirs))
        self._thread = threading.Thread(target=self._run, args=(server,), daemon=True)
        self._thread.start()

    def _run(self, server: EngineServer) -> None:
        self.code = server.run(CONFIG)

    def _leave(self, code: int) -> None:
        self.left.set()

    def post(self, *messages: Any) -> None:
        self._connection.send(list(messages))

    def hang_up(self) -> None:
        """Close the pipe and see the reader leave: later it would end the tests' own process."""
        self._connection.close()
        assert self.left.wait(PATIENCE_S)

    def wait_for(self, wanted: Any) -> Any:
        """The first message, already received or not, for which `wanted(message)` is true."""
        deadline_s, seen = time.monotonic() + PATIENCE_S, 0
        while True:
            for message in self.received[seen:]:
                if wanted(message):
                    return message
            seen = len(self.received)
            if not self._connection.poll(deadline_s - time.monotonic()):
                raise AssertionError(f"nothing like it among {self.received}")
            self.received += self._connection.recv()

    def wait_end(self, name: str) -> FinishEvent:
        return self.wait_for(lambda m: isinstance(m, Happened) and is_end(m.event, name)).event

    def join(self) -> int | None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.code


class Box:
    """Stands for an outbox."""

    def __init__(self) -> None:
        self.posted: list[Any] = []
        self.post = self.posted.append


def is_end(event: Any, name: str) -> bool:
    return isinstance(event, FinishEvent) and event.request_id == name


def submit(name: str, n: int = 20, *, seed: int = 0, again: bool = False, **params: Any) -> Submit:
    ids = np.array(random_ids(n, seed=seed), dtype=np.int32)
    return Submit(name, ids, SamplingParams(**{"max_tokens": 3, "ignore_eos": True, **params}), again=again)


class Gate:
    """Holds an engine's steps until it is opened, so that a test knows that one is running."""

    def __init__(self, engine: Any):
        self.entered, self.open = threading.Event(), threading.Event()
        run = engine.runner.run

        def held(*args: Any) -> Any:
            self.entered.set()
            assert self.open.wait(3 * PATIENCE_S)
            return run(*args)

        engine.runner.run = held


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path))
    made: list[Served] = []

    def start(engine: Any) -> Served:
        served = Served(monkeypatch, lambda config, progress: engine)
        made.append(served)
        served.wait_for(lambda m: isinstance(m, Ready))
        return served

    yield start
    for served in made:
        if not served.left.is_set():
            if served.code is None:
                served.post(Stop())
            served.join()
            served.hang_up()


def test_an_answer_comes_as_the_engine_alone_would_give_it(serve) -> None:
    model = make_tiny("llama", peaky=True)
    served = serve(make_engine(model))
    served.post(submit("a", 40))
    end = served.wait_end("a")
    assert end.token_ids == generate(make_engine(model), random_ids(40), 3, ignore_eos=True).token_ids
    about_a = [m for m in served.received if isinstance(m, Accepted | Happened)]
    assert isinstance(about_a[0], Accepted) and about_a[0].request_id == "a"
    tokens = [m.event for m in about_a[1:] if isinstance(m.event, TokenEvent)]
    assert tuple(t.token_id for t in tokens) == end.token_ids


def test_it_answers_while_a_step_runs(serve) -> None:
    """Accepted, refused, cancelled and planned, all while the engine's thread is held inside a step."""
    engine = make_engine(make_tiny("llama"), max_running=1, max_queue=2)
    gate, served = Gate(engine), serve(engine)
    served.post(submit("a"))
    assert gate.entered.wait(PATIENCE_S)
    served.post(
        submit("b"), submit("c"), submit("d"), submit("long", 5000), Cancel("b"), Query(7, "plan", {"tokens": 9})
    )
    for name in ("b", "c"):
        served.wait_for(lambda m, name=name: isinstance(m, Accepted) and m.request_id == name)
    full = served.wait_for(lambda m: isinstance(m, Refused) and m.request_id == "d")
    assert full.code == "queue_full"
    assert (
        served.wait_for(lambda m: isinstance(m, Refused) and m.request_id == "long").code == "context_length_exceeded"
    )
    assert served.wait_for(lambda m: isinstance(m, Answer)).value["verdict"] == "fits"
    assert not any(isinstance(m, Happened) and isinstance(m.event, TokenEvent | FinishEvent) for m in served.received)
    gate.open.set()
    assert served.wait_end("b").reason == "cancelled" and served.wait_end("c").reason == "length"


def test_its_place_in_the_queue_is_told_at_once(serve) -> None:
    engine = make_engine(make_tiny("llama"), max_running=1)
    gate, served = Gate(engine), serve(engine)
    served.post(submit("a"))
    assert gate.entered.wait(PATIENCE_S)
    served.post(submit("b"), submit("c"))
    for name, place in (("b", 1), ("c", 2)):
        told = served.wait_for(lambda m, name=name: isinstance(m, Happened) and m.event.request_id == name)
        assert (told.event.stage, told.event.queue_position) == ("queued", place)
    gate.open.set()
    served.wait_end("c")


def test_what_an_engine_had_accepted_is_not_refused_by_the_next_ones_queue(serve) -> None:
    engine = make_engine(make_tiny("llama"), max_running=1, max_queue=1)
    gate, served = Gate(engine), serve(engine)
    served.post(submit("a"))
    assert gate.entered.wait(PATIENCE_S)
    served.post(*(submit(f"r{i}", again=True) for i in range(4)), submit("new"))
    assert served.wait_for(lambda m: isinstance(m, Refused)).request_id == "new"
    gate.open.set()
    assert [served.wait_end(f"r{i}").reason for i in range(4)] == ["length"] * 4


@pytest.mark.parametrize(
    ("bad", "code", "match"),
    [
        (Submit("x", np.zeros(0, np.int32), SamplingParams()), "invalid_request", "empty"),
        (Submit("x", np.array([3, 320], np.int32), SamplingParams()), "invalid_request", "320 is outside"),
        (Submit("x", np.array([3, -1], np.int32), SamplingParams()), "invalid_request", "-1 is outside"),
        (submit("x", 600, max_tokens=600), "kv_memory_exceeded", "1,200 tokens"),
    ],
)
def test_what_can_never_run_is_refused_before_any_work(serve, bad: Submit, code: str, match: str) -> None:
    """B100: refused at once with a reason (vllm-project/vllm#39734), and the next one is served."""
    engine = make_engine(make_tiny("llama"), kv_tokens=49 * 16)
    served = serve(engine)
    served.post(bad, submit("good"))
    refused = served.wait_for(lambda m: isinstance(m, Refused))
    assert refused.request_id == "x" and refused.code == code and match in refused.message
    assert served.wait_end("good").reason == "length" and engine.scheduler.counters.finished == 1


def test_a_request_that_trips_over_a_mistake_of_ours_takes_nobody_along(serve) -> None:
    served = serve(make_engine(make_tiny("llama")))
    bad = Submit("bad", np.array([5], np.int32), params=None)  # type: ignore[arg-type]
    served.post(bad, submit("good"))
    assert served.wait_for(lambda m: isinstance(m, Refused)).code == "engine_error"
    assert served.wait_end("good").reason == "length"


@pytest.mark.parametrize(("error", "answers"), [(EngineError("broken"), 0), (QueueFullError("full"), 1)])
def test_what_comes_when_the_engine_has_just_broken_is_left_to_the_next_one(error: Exception, answers: int) -> None:
    class Loop:
        def submit(self, *_: Any, **__: Any) -> None:
            raise error

    box = Box()
    server = EngineServer(None, box)  # type: ignore[arg-type]
    server._submit(submit("late"), make_engine(make_tiny("llama")), Loop())  # type: ignore[arg-type]
    assert len(box.posted) == answers


def test_two_requests_cannot_share_a_name(serve) -> None:
    engine = make_engine(make_tiny("llama"))
    gate, served = Gate(engine), serve(engine)
    served.post(submit("a"), submit("a"))
    assert "another id" in served.wait_for(lambda m: isinstance(m, Refused)).message
    gate.open.set()
    assert served.wait_end("a").reason == "length"


def test_an_engine_that_breaks_says_so_once_and_ends(serve) -> None:
    engine = make_engine(make_tiny("llama"))
    gate, served = Gate(engine), serve(engine)
    served.post(submit("a"), submit("b"))
    assert gate.entered.wait(PATIENCE_S)

    def out_of_order(*_: Any) -> None:
        raise AssertionError("out of order")

    engine.scheduler.commit = out_of_order
    gate.open.set()
    broken = served.wait_for(lambda m: isinstance(m, Broken))
    assert "out of order" in broken.message and not broken.user_error
    assert served.join() == 1
    assert sum(isinstance(m, Broken) for m in served.received) == 1
    assert not any(isinstance(m, Happened) and isinstance(m.event, FinishEvent) for m in served.received)


@pytest.mark.parametrize(
    ("error", "user_error"), [(ModelError("there is no model 'x'"), True), (RuntimeError("bad luck"), False)]
)
def test_a_model_that_cannot_be_loaded_is_told_in_one_line(monkeypatch, error: Exception, user_error: bool) -> None:
    def build(config: Any, progress: Any) -> Any:
        progress("converting", 1, 2)
        raise error

    served = Served(monkeypatch, build)
    broken = served.wait_for(lambda m: isinstance(m, Broken))
    assert str(error) in broken.message and "\n" not in broken.message and broken.user_error is user_error
    assert served.join() == 1 and Loading("converting", 1, 2) in served.received
    served.hang_up()


def test_stopping_cancels_what_runs_and_ends_well(serve) -> None:
    engine = make_engine(make_tiny("llama"))
    gate, served = Gate(engine), serve(engine)
    served.post(submit("a", max_tokens=1000), submit("b"))
    assert gate.entered.wait(PATIENCE_S)
    served.post(Stop())
    gate.open.set()
    assert served.wait_end("a").reason == "cancelled" and served.wait_end("b").reason == "cancelled"
    assert served.join() == 0


def test_it_leaves_when_the_other_side_is_gone_even_in_the_middle_of_a_step(serve) -> None:
    engine = make_engine(make_tiny("llama"))
    gate, served = Gate(engine), serve(engine)
    served.post(submit("a"))
    assert gate.entered.wait(PATIENCE_S)
    served.hang_up()
    gate.open.set()


@pytest.mark.parametrize("how", ["stopped", "hung up"])
def test_it_leaves_in_the_middle_of_loading(monkeypatch, how: str) -> None:
    loading, loaded = threading.Event(), threading.Event()

    def build(config: Any, progress: Any) -> Any:
        loading.set()
        loaded.wait(PATIENCE_S)
        raise ModelError("too late")

    served = Served(monkeypatch, build)
    assert loading.wait(PATIENCE_S)
    if how == "stopped":
        served.post(Stop())
        assert served.left.wait(PATIENCE_S)
    served.hang_up()
    loaded.set()
    served.join()


def test_an_engine_never_waits_for_a_reader(serve) -> None:
    """Nobody reads the pipe: the engine computes thousands of events, more than a pipe holds, and finishes."""
    engine = make_engine(make_tiny("llama", num_hidden_layers=1), kv_tokens=8192)
    served = serve(engine)
    served.post(*(submit(f"r{i}", seed=i, max_tokens=500) for i in range(4)))
    deadline_s = time.monotonic() + PATIENCE_S
    while engine.scheduler.counters.finished < 4:
        assert time.monotonic() < deadline_s, engine.scheduler.counters
        time.sleep(0.01)
    assert all(served.wait_end(f"r{i}").usage.completion_tokens == 500 for i in range(4))


def test_the_last_snapshot_says_that_nothing_is_held(serve) -> None:
    model = make_tiny("gemma3_text")
    served = serve(make_engine(model))
    served.post(submit("a", 100), submit("b", 100), Cancel("b"))
    served.wait_end("a"), served.wait_end("b")
    last = served.wait_for(lambda m: isinstance(m, EngineStats) and m.counters["finished"] == 2 and m.running == 0)
    g1 = last.kv["g1"]
    assert g1["held"] == 0 and 0 < g1["cached"] <= g1["cap"]
    counters = last.counters
    assert counters["cached_tokens_g1"] + counters["missed_tokens"] >= 100 and counters["steps"] > 0
    assert counters["cancels"] <= 1 and counters["preemptions"] == 0


def test_snapshots_only_grow(serve) -> None:
    served = serve(make_engine(make_tiny("llama")))
    for i in range(3):
        served.post(submit(f"r{i}", seed=i))
        served.wait_end(f"r{i}")
        served.wait_for(lambda m, i=i: isinstance(m, EngineStats) and m.counters["finished"] == i + 1)
    snapshots = [m.counters for m in served.received if isinstance(m, EngineStats)]
    for before, after in pairwise(snapshots):
        assert all(after[name] >= value for name, value in before.items())
    assert snapshots[-1]["missed_tokens"] == snapshots[-1]["prefill_tokens"] == 60
    assert snapshots[-1]["decode_tokens"] == 6


def test_a_question_that_makes_no_sense_gets_an_error(serve) -> None:
    served = serve(make_engine(make_tiny("llama")))
    served.post(Query(1, "plan", {"tokens": 0}), Query(2, "weather", {}), Query(3, "plan", {"tokens": 10**30}))
    for number in (1, 2, 3):
        answer = served.wait_for(lambda m, number=number: isinstance(m, Answer) and m.query_id == number)
        assert answer.error or answer.value["verdict"] == "refused"
    served.post(submit("a"))
    assert served.wait_end("a").reason == "length"


def test_progress_is_told_before_the_first_token(serve) -> None:
    served = serve(make_engine(make_tiny("llama"), chunk_tokens=16))
    served.post(submit("a", 100))
    served.wait_end("a")
    events = [m.event for m in served.received if isinstance(m, Happened)]
    first_token = next(i for i, e in enumerate(events) if isinstance(e, TokenEvent))
    progress = [e for e in events[:first_token] if isinstance(e, ProgressEvent)]
    assert progress and all(a.processed <= b.processed for a, b in pairwise(progress))
    assert progress[-1].processed == 100


def test_loading_reports_are_thinned() -> None:
    box = Box()
    report = LoadingReports(box)
    for done in range(1000):
        report("reading", done, 1000)
    report("reading", 1000, 1000)
    report("compiling", 0, 1)
    assert box.posted[0] == Loading("reading", 0, 1000)
    assert box.posted[-2:] == [Loading("reading", 1000, 1000), Loading("compiling", 0, 1)] and len(box.posted) < 50


def test_what_is_told_of_the_model() -> None:
    engine = make_engine(make_tiny("llama"), kv_tokens=1024, eos=(2, 7))
    info = model_info(engine)
    assert (info.vocab_size, info.max_positions, info.block_tokens) == (320, 4096, 16)
    assert info.longest_request == 1025 and info.eos_token_ids == (2, 7)
    assert info.plan["tokens"] == 1025 and info.plan["verdict"] == "fits" and info.kv_format == "fp32"
