"""A real engine process behind its client: answers, speed of the pipe, deaths, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from longctx.config import EngineConfig
from longctx.errors import LongctxError
from longctx.events import FinishEvent, ProgressEvent, TokenEvent
from longctx.params import SamplingParams
from longctx.server.client import EngineClient
from longctx.server.errors import ApiError
from longctx.server.messages import Submit
from longctx.server.ticket import Restarted, Ticket
from tests.helpers.engine import generate, make_engine
from tests.helpers.tiny import make_tiny, random_ids

PATIENCE_S = 180.0
ROOT = Path(__file__).resolve().parents[3]
LONG_CONTEXT = 1 << 20
OPTIONS = {"block_tokens": 16, "max_chunk_tokens": 256, "max_running": 4, "chunk_tokens": 64}


class Driven:
    """A client and the event loop it lives in, for tests that are not coroutines themselves."""

    def __init__(self, client: Callable[[], EngineClient]):
        self._runner = asyncio.Runner()
        self.client = self.run(_started(client))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(work, PATIENCE_S))

    def close(self) -> None:
        self.run(self.client.stop())
        self._runner.close()


async def _started(client: Callable[[], EngineClient]) -> EngineClient:
    made = client()
    await made.start()
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny("llama", peaky=True, max_position_embeddings=LONG_CONTEXT).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def driven(folder, tmp_path_factory) -> Iterator[Driven]:
    """One engine process for the tests that leave it alive. Its pool holds a million tokens, untouched until used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGCTX_CACHE", str(tmp_path_factory.mktemp("cache")))
        config = EngineConfig.from_options(str(folder), kv_memory="640MiB", **OPTIONS)
        made = Driven(lambda: EngineClient(config))
        yield made
        assert made.client.restarts == 0
        made.close()


def small_config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig.from_options(str(folder), kv_memory="4MiB", max_model_len=4096, **{**OPTIONS, **options})


def submit(name: str, ids: list[int] | np.ndarray, max_tokens: int = 3, **params: Any) -> Submit:
    values = {"max_tokens": max_tokens, "ignore_eos": True, **params}
    return Submit(name, np.asarray(ids, dtype=np.int32), SamplingParams(**values))


async def last(ticket: Ticket) -> FinishEvent:
    events = [event async for event in ticket]
    assert isinstance(events[-1], FinishEvent)
    return events[-1]


async def finish(client: EngineClient, request: Submit) -> FinishEvent:
    return await last(await client.submit(request))


async def idle(client: EngineClient) -> dict[str, int]:
    """The counters after everything so far has ended, and one request more."""
    end = await finish(client, submit("last", [5, 6], 1))
    assert end.reason == "length" and not client._tickets
    # A snapshot that was made before this end may still come first.
    seen = client.stats
    while client.stats is None or client.stats is seen or client.stats.running + client.stats.waiting:
        await asyncio.sleep(0.01)
    return client.stats.counters


def gone(pid: int) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


# -- one engine ------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_an_engine_in_this_process(driven: Driven) -> None:
    model = make_tiny("llama", peaky=True, max_position_embeddings=LONG_CONTEXT)
    ids = random_ids(100, seed=3)
    for params in ({}, {"temperature": 1.0, "seed": 5}):
        end = driven.run(finish(driven.client, submit("a", ids, 8, **params)))
        wanted = generate(make_engine(model, **OPTIONS), ids, 8, ignore_eos=True, **params)
        assert end.token_ids == wanted.token_ids and end.reason == "length"


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(driven: Driven) -> None:
    """B110's first half: code and true counts before any work (vllm-project/vllm#33418)."""

    async def scene() -> None:
        for ids, new in ((np.full(LONG_CONTEXT + 1, 5), 1), (np.full(LONG_CONTEXT - 5, 5), 10)):
            with pytest.raises(ApiError, match=f"{LONG_CONTEXT:,}") as caught:
                await driven.client.submit(submit("long", ids, new))
            assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
            assert f"{len(ids):,}" in caught.value.message

    driven.run(scene())


def test_the_last_token_of_the_model_is_reachable_and_the_plan_says_so(driven: Driven) -> None:
    async def scene() -> None:
        info = driven.client.info
        assert info is not None and info.longest_request == info.max_positions == LONG_CONTEXT
        assert (await driven.client.plan(LONG_CONTEXT))["verdict"] == "fits"
        assert (await driven.client.plan(LONG_CONTEXT + 1))["verdict"] == "refused"

    driven.run(scene())


def test_a_million_tokens_hold_up_neither_side(driven: Driven) -> None:
    """While a stream decodes, a prompt of a million tokens is sent: the stream's longest pause grows by little, and so
    does the event loop's."""
    client = driven.client
    million = np.random.default_rng(0).integers(3, 320, 1_000_000).astype(np.int32)

    async def longest_gap(big: bool) -> tuple[float, float]:
        stream = await client.submit(submit("stream", random_ids(20), 600))
        gaps, before, loop_gap, posted = [], 0.0, 0.0, None

        async def tick() -> None:
            nonlocal loop_gap
            while True:
                at_s = time.perf_counter()
                await asyncio.sleep(0.001)
                loop_gap = max(loop_gap, time.perf_counter() - at_s)

        ticking = asyncio.create_task(tick())
        async for event in stream:
            if not isinstance(event, TokenEvent):
                continue
            now_s = time.perf_counter()
            if event.index > 100:
                gaps.append(now_s - before)
            before = now_s
            if big and event.index == 200:
                posted = asyncio.create_task(client.submit(submit("big", million, 1)))
            if posted is not None and posted.done():
                # Accepted: what it does from now on is prefill, which is meant to take its time.
                client.cancel("big")
                client.cancel("stream")
        ticking.cancel()
        if posted is not None:
            assert (await last(await posted)).reason == "cancelled"
        return max(gaps), loop_gap

    async def scene() -> None:
        (usual, usual_loop), (beside, beside_loop) = await longest_gap(False), await longest_gap(True)
        print(f"stream {usual:.4f} -> {beside:.4f} s, event loop {usual_loop:.4f} -> {beside_loop:.4f} s")
        assert beside < usual + 0.25 and beside_loop < usual_loop + 0.25

    driven.run(scene())


def test_cancelling_ends_a_long_prefill_between_two_layers(driven: Driven) -> None:
    """The end follows at once, the blocks are free and the next request begins; what was computed stays."""
    client = driven.client

    async def scene() -> None:
        ids = random_ids(40_000, seed=4)
        ticket = await client.submit(submit("long", ids))
        async for event in ticket:
            if isinstance(event, ProgressEvent) and event.processed > 500:
                break
        at_s = time.perf_counter()
        assert client.cancel("long")
        end = await last(ticket)
        took_s = time.perf_counter() - at_s
        print(f"cancelled after {took_s * 1e3:.1f} ms")
        assert end.reason == "cancelled" and end.computed_tokens < 30_000 and took_s < 2.0
        again = await client.submit(submit("again", [*ids[:500], 5], 1))
        assert (await last(again)).usage.cached_tokens >= 480

    driven.run(scene())


def test_one_document_asked_about_by_several_at_once_is_computed_once(driven: Driven) -> None:
    """Six questions arrive together: at most 1.05 times one document is computed."""
    client = driven.client
    document = random_ids(3000, seed=11)

    async def scene() -> None:
        before = (await idle(client))["prefill_tokens"]
        ends = await asyncio.gather(
            *(finish(client, submit(f"q{i}", [*document, *random_ids(4, seed=i)], 2)) for i in range(6))
        )
        computed = (await idle(client))["prefill_tokens"] - before
        assert all(end.reason == "length" for end in ends)
        assert len(document) <= computed <= 1.05 * len(document)
        assert sorted(end.usage.cached_tokens // 16 for end in ends) == [0] + [len(document) // 16] * 5

    driven.run(scene())


def test_a_reader_that_is_cancelled_leaves_the_document_to_those_who_wait_for_it(driven: Driven) -> None:
    client = driven.client
    document = random_ids(6000, seed=12)

    async def scene() -> None:
        first = await client.submit(submit("first", document))
        others = [await client.submit(submit(f"o{i}", [*document, 5 + i], 2)) for i in range(2)]
        async for event in first:
            if isinstance(event, ProgressEvent) and event.processed > 1000:
                client.cancel("first")
        ends = [await last(ticket) for ticket in others]
        assert all(end.reason == "length" for end in ends)
        assert sum(end.computed_tokens for end in ends) <= 1.05 * len(document)

    driven.run(scene())


def test_two_hundred_requests_with_random_ends_leave_nothing(driven: Driven) -> None:
    """Every request ends exactly once, cancelled ones too, and no block is left held; the engine has checked itself."""
    client, rng = driven.client, random.Random(5)

    async def live(number: int) -> str:
        ids = random_ids(rng.choice([1, 16, 100, 700]), seed=rng.randrange(5))
        params = {"temperature": rng.choice([0.0, 1.0]), "seed": number}
        await asyncio.sleep(rng.random() * 2)
        ticket = await client.submit(submit(f"m{number}", ids, rng.choice([1, 5, 40]), **params))
        if (leave := rng.random()) < 0.2:
            client.cancel(ticket.id)
        reasons, count = [], 0
        async for event in ticket:
            count += 1
            if leave < 0.5 and count == rng.randrange(1, 10):
                client.cancel(ticket.id)
            if isinstance(event, FinishEvent):
                reasons.append(event.reason)
        [reason] = reasons
        return reason

    async def scene() -> None:
        started = (await idle(client))["finished"]
        reasons = await asyncio.gather(*(live(i) for i in range(200)))
        assert set(reasons) == {"length", "cancelled"}
        counters = await idle(client)
        assert counters["finished"] - started == 201 and client._tickets == {}
        assert client.stats is not None and client.stats.kv["g1"]["held"] == 0
        # Idle for a while it recomputes every invariant of its cache; a broken one would end it.
        await asyncio.sleep(1.5)
        assert (await finish(client, submit("after", [5, 6, 7]))).reason == "length" and client.restarts == 0

    driven.run(scene())


def test_an_interrupt_of_the_whole_group_is_the_parents_alone(driven: Driven) -> None:
    client = driven.client
    assert client.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(client.pid, number)
    assert driven.run(finish(client, submit("a", [5, 6]))).reason == "length"
    assert client.restarts == 0


def test_the_idle_engine_rests(driven: Driven) -> None:
    process = psutil.Process(driven.client.pid)
    driven.run(asyncio.sleep(1.5))
    used, at_s = sum(process.cpu_times()[:2]), time.monotonic()
    driven.run(asyncio.sleep(1.0))
    assert sum(process.cpu_times()[:2]) - used < 0.3 * (time.monotonic() - at_s)


# -- engines that die ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_engine_is_replaced_and_what_nobody_read_runs_again(folder, tmp_path, monkeypatch) -> None:
    """One stream had delivered a token and fails; the other, drawn at random, gives what it would have given."""
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path))

    async def scene(client: EngineClient) -> None:
        ids, drawn = random_ids(30, seed=2), {"temperature": 1.0}
        read, unread = (
            await client.submit(submit("read", ids, 3000)),
            await client.submit(submit("b", ids, 40, **drawn)),
        )
        async for event in read:
            if isinstance(event, TokenEvent):
                read.delivered = True
                break
        assert client.pid is not None
        old = client.pid
        os.kill(old, signal.SIGKILL)
        with pytest.raises(ApiError, match="SIGKILL") as caught:
            await last(read)
        assert (caught.value.status, caught.value.code) == (500, "engine_error")
        assert client.state == "restarting"
        during = asyncio.create_task(client.submit(submit("during", ids, 2)))
        events = [event async for event in unread]
        assert any(isinstance(event, Restarted) for event in events) and events[-1].reason == "length"
        assert client.state == "ready" and client.pid != old and client.restarts == 1
        same = await finish(client, submit("same", ids, 40, seed=unread.seed, **drawn))
        assert same.token_ids == events[-1].token_ids
        assert (await last(await during)).reason == "length"

    made = Driven(lambda: EngineClient(small_config(folder)))
    try:
        made.run(scene(made.client))
    finally:
        pid = made.client.pid
        made.close()
    assert gone(pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "match"),
    [("no/such/folder/at/all", {}, "there is no model"), (None, {"kv_memory": 1000}, "minimum|at least|needs")],
)
def test_a_model_that_cannot_be_loaded_is_the_users_error_in_one_line(folder, model, options, match) -> None:
    config = EngineConfig.from_options(model or str(folder), **options)
    client = EngineClient(config)

    async def scene() -> None:
        with pytest.raises(LongctxError, match=match) as caught:
            await client.start()
        assert "\n" not in str(caught.value) and client.state == "failed"
        await client.stop()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


PARENT = """
import asyncio, sys
from longctx.config import EngineConfig
from longctx.server.client import EngineClient
from longctx.server.messages import Submit
from longctx.params import SamplingParams
import numpy as np

async def main():
    options = {"kv_memory": "16MiB", "max_model_len": 4096, "block_tokens": 16}
    client = EngineClient(EngineConfig.from_options(sys.argv[1], **options))
    starting = asyncio.create_task(client.start())
    if sys.argv[2] == "loading":
        await asyncio.sleep(0.5)
    else:
        await starting
        params = SamplingParams(max_tokens=4000, ignore_eos=True)
        await client.submit(Submit("a", np.array([5, 6], np.int32), params))
    print(client.pid, flush=True)
    if sys.argv[3] == "returns":
        return
    await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("when", "how"), [("working", "kill"), ("loading", "kill"), ("working", "returns")])
def test_no_engine_outlives_its_parent(folder, tmp_path, when: str, how: str) -> None:
    """Not by kill -9, not while it loads, and not when the parent simply ends without a word."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder), when, how],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LONGCTX_CACHE": str(tmp_path)},
        cwd=ROOT,
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if how == "kill":
            assert psutil.pid_exists(pid)
            parent.kill()
        assert parent.wait(PATIENCE_S) == (-signal.SIGKILL if how == "kill" else 0)
        assert gone(pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
