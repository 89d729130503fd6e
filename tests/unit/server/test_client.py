"""The client's rules around an engine process that is played by the test: who runs again, who fails, who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import longctx.server.client
from longctx.config import EngineConfig
from longctx.errors import EngineError, LongctxError
from longctx.events import TokenEvent
from longctx.params import SamplingParams
from longctx.server.client import EngineClient
from longctx.server.errors import ApiError
from longctx.server.messages import (
    Accepted,
    Answer,
    Broken,
    Cancel,
    EngineStats,
    Happened,
    Loading,
    ModelInfo,
    Query,
    Ready,
    Refused,
    Stop,
    Submit,
)
from longctx.server.ticket import Restarted, Ticket, cancelled_event

CONFIG = EngineConfig.from_options("tiny")
INFO = ModelInfo("tiny", "/tiny", 320, 4096, 4096, "float32", "fp32", 1, 1, 1, 16, (2,), {})
PATIENCE_S = 20.0


class FakeChild:
    """Stands for an engine process; the test speaks for it. `made` has every one, the latest last."""

    made: list[FakeChild]

    def __init__(self, config: EngineConfig, on_messages: Callable[[list[Any]], None]):
        self.config, self.pid, self.killed = config, 1000 + len(self.made), False
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.received: list[Any] = []
        self._on_messages = on_messages
        self.made.append(self)

    def post(self, message: Any) -> None:
        self.received.append(message)
        if isinstance(message, Stop):
            self.die("exit code 0")

    def kill(self) -> None:
        self.killed = True
        self.die("killed by SIGKILL")

    def say(self, *messages: Any) -> None:
        self._on_messages(list(messages))

    def die(self, status: str = "killed by SIGKILL") -> None:
        if not self.ended.done():
            self.ended.set_result(status)

    def submits(self) -> list[Submit]:
        return [m for m in self.received if isinstance(m, Submit)]


@pytest.fixture(autouse=True)
def _fake_child(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeChild.made = []
    monkeypatch.setattr(longctx.server.client, "Child", FakeChild)
    monkeypatch.setattr(longctx.server.client, "LONGEST_PAUSE_S", 0.01)


def play(scene: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
    """Run `scene(client, *args)` with a client whose first engine is ready."""

    async def run() -> Any:
        client = EngineClient(CONFIG, **options)
        starting = asyncio.create_task(client.start())
        await until(lambda: FakeChild.made)
        FakeChild.made[0].say(Ready(INFO))
        await starting
        return await scene(client, *args)

    return asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def submit(name: str, seed: int | None = None) -> Submit:
    return Submit(name, np.arange(5, dtype=np.int32), SamplingParams(seed=seed))


async def running(client: EngineClient, name: str, seed: int = 77) -> Ticket:
    """A ticket that the present engine has accepted."""
    waiting = asyncio.create_task(client.submit(submit(name)))
    child = FakeChild.made[-1]
    await until(lambda: name in [s.request_id for s in child.submits()])
    child.say(Accepted(name, seed))
    return await waiting


async def next_engine(number: int, ready: bool = True) -> FakeChild:
    await until(lambda: len(FakeChild.made) == number)
    if ready:
        FakeChild.made[-1].say(Ready(INFO))
    return FakeChild.made[-1]


def end(name: str) -> Happened:
    return Happened(cancelled_event(submit(name)))


async def outcome(ticket: Ticket) -> tuple[list[Any], ApiError | None]:
    seen: list[Any] = []
    try:
        async for event in ticket:
            seen.append(event)
    except ApiError as error:
        return seen, error
    return seen, None


# -- one engine ------------------------------------------------------------------------------------------------------


def test_what_the_engine_says_is_there_to_be_read() -> None:
    async def scene(client: EngineClient) -> None:
        assert (client.state, client.info, client.pid) == ("ready", INFO, 1000)
        stats = EngineStats(1, 2, {})
        FakeChild.made[0].say(stats)
        assert client.stats is stats

    play(scene)


def test_loading_is_told_until_it_is_ready() -> None:
    async def run() -> None:
        client = EngineClient(CONFIG)
        starting = asyncio.create_task(client.start())
        await until(lambda: FakeChild.made)
        assert client.state == "starting" and client.loading is not None
        FakeChild.made[0].say(Loading("converting", 1, 2))
        assert client.loading == Loading("converting", 1, 2)
        FakeChild.made[0].say(Ready(INFO))
        await starting
        assert client.loading is None

    asyncio.run(run())


def test_requests_get_their_own_events_and_seeds() -> None:
    async def scene(client: EngineClient) -> None:
        a, b = await running(client, "a", 1), await running(client, "b", 2)
        assert (a.seed, b.seed) == (1, 2)
        tokens = [TokenEvent(name, 5, "x", 0) for name in ("b", "a", "nobody")]
        FakeChild.made[0].say(*map(Happened, tokens), end("a"), end("b"))
        assert [type(e).__name__ for e in (await outcome(a))[0]] == ["TokenEvent", "FinishEvent"]
        assert (await outcome(b))[0][0] is tokens[0]
        assert not client.cancel("a")

    play(scene)


def test_a_refusal_is_an_api_error_with_the_engines_code() -> None:
    async def scene(client: EngineClient, code: str) -> ApiError:
        waiting = asyncio.create_task(client.submit(submit("a")))
        await until(FakeChild.made[0].submits)
        FakeChild.made[0].say(Refused("a", code, "no"))
        with pytest.raises(ApiError, match="no") as caught:
            await waiting
        assert not client.cancel("a")
        return caught.value

    assert play(scene, "queue_full").status == 429
    FakeChild.made = []
    error = play(scene, "context_length_exceeded")
    assert (error.status, error.code) == (400, "context_length_exceeded")


def test_cancelling_asks_the_engine_and_waits_for_its_word() -> None:
    async def scene(client: EngineClient) -> None:
        ticket = await running(client, "a")
        assert client.cancel("a") and not client.cancel("b")
        assert FakeChild.made[0].received[-1] == Cancel("a")
        FakeChild.made[0].say(end("a"))
        assert [e.reason for e in (await outcome(ticket))[0]] == ["cancelled"]

    play(scene)


def test_a_caller_who_gives_up_before_the_answer_leaves_nothing_running() -> None:
    async def scene(client: EngineClient) -> None:
        waiting = asyncio.create_task(client.submit(submit("a")))
        await until(FakeChild.made[0].submits)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert FakeChild.made[0].received[-1] == Cancel("a") and not client._tickets

    play(scene)


def test_questions_are_answered_each_with_its_own() -> None:
    async def scene(client: EngineClient) -> None:
        child = FakeChild.made[0]
        asking = [asyncio.create_task(client.plan(n, concurrency=2)) for n in (10, 20)]
        await until(lambda: len(child.received) == 2)
        first, second = child.received
        assert isinstance(first, Query) and first.args == {"tokens": 10, "concurrency": 2}
        child.say(Answer(second.query_id, {"n": 20}), Answer(first.query_id, code="invalid_request", error="bad"))
        assert await asking[1] == {"n": 20}
        with pytest.raises(ApiError, match="bad"):
            await asking[0]

    play(scene)


# -- starting and stopping -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "error", "match"),
    [
        (Broken("there is no model 'x'", user_error=True), LongctxError, "there is no model 'x'"),
        (Broken("it broke"), EngineError, "it broke"),
        (None, EngineError, "killed by SIGKILL"),
    ],
)
def test_a_first_start_that_fails_is_not_tried_again(message, error, match) -> None:
    async def run() -> None:
        client = EngineClient(CONFIG)
        starting = asyncio.create_task(client.start())
        await until(lambda: FakeChild.made)
        if message is not None:
            FakeChild.made[0].say(message)
        FakeChild.made[0].die()
        with pytest.raises(error, match=match):
            await starting
        assert client.state == "failed" and len(FakeChild.made) == 1
        with pytest.raises(ApiError, match=match):
            await client.submit(submit("a"))
        await client.stop()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_stopping_ends_every_request_and_takes_no_more() -> None:
    async def scene(client: EngineClient) -> None:
        ticket = await running(client, "a")
        asking = asyncio.create_task(client.plan(5))
        await until(lambda: client._queries)
        await client.stop()
        assert isinstance(FakeChild.made[0].received[-1], Stop) and client.state == "stopping"
        assert (await outcome(ticket))[1].code == "draining"
        for call in (asking, client.submit(submit("b")), client.plan(3)):
            with pytest.raises(ApiError) as caught:
                await call
            assert caught.value.status == 503
        assert len(FakeChild.made) == 1
        await client.stop()

    play(scene)


def test_what_a_stopping_engine_refuses_is_not_blamed_on_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(client: EngineClient) -> None:
        waiting = asyncio.create_task(client.submit(submit("a")))
        child = FakeChild.made[0]
        await until(child.submits)
        monkeypatch.setattr(
            FakeChild, "post", lambda self, message: self.say(Refused("a", "invalid_request", "closed"))
        )
        stopping = asyncio.create_task(client.stop())
        with pytest.raises(ApiError) as caught:
            await waiting
        assert caught.value.status == 503
        child.die()
        await stopping

    play(scene)


def test_an_engine_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeChild, "post", lambda self, message: None)

    async def scene(client: EngineClient) -> None:
        await client.stop()
        assert FakeChild.made[0].killed

    play(scene, stop_wait_s=0.01)


# -- deaths ----------------------------------------------------------------------------------------------------------


def test_what_nobody_has_read_runs_again_with_its_seed_and_in_its_order() -> None:
    async def scene(client: EngineClient) -> None:
        tickets = [await running(client, name, seed) for name, seed in (("a", 11), ("b", 12))]
        FakeChild.made[0].say(Happened(TokenEvent("a", 5, "x", 0)))
        FakeChild.made[0].die()
        await until(lambda: client.state == "restarting")
        assert client.restarts == 1 and "SIGKILL" in (client.last_failure or "")
        child = await next_engine(2)
        assert client.state == "ready"
        again = child.submits()
        assert [(s.request_id, s.params.seed, s.again) for s in again] == [("a", 11, True), ("b", 12, True)]
        child.say(Accepted("a", 11), Accepted("b", 12), end("a"), end("b"))
        for ticket in tickets:
            seen, error = await outcome(ticket)
            assert error is None and seen[0] == Restarted(ticket.id) and seen[1].reason == "cancelled"

    play(scene)


def test_what_somebody_has_read_is_an_error() -> None:
    async def scene(client: EngineClient) -> None:
        ticket = await running(client, "a")
        ticket.delivered = True
        FakeChild.made[0].die()
        # Not even if its reader is slow to hear of it.
        assert (await next_engine(2)).submits() == []
        seen, error = await outcome(ticket)
        assert seen == [] and error is not None and (error.status, error.code) == (500, "engine_error")

    play(scene)


def test_a_request_that_saw_two_engines_die_is_not_tried_on_a_third() -> None:
    async def scene(client: EngineClient) -> None:
        ticket = await running(client, "a")
        FakeChild.made[0].die()
        await until(lambda: client.state == "restarting")
        second = await next_engine(2)
        second.say(Accepted("a", 77))
        late = await running(client, "late")
        second.die()
        error = (await outcome(ticket))[1]
        assert error is not None and error.code == "engine_error"
        assert [s.request_id for s in (await next_engine(3)).submits()] == ["late"]
        FakeChild.made[-1].say(Accepted("late", 77), end("late"))
        assert (await outcome(late))[1] is None

    play(scene)


def test_a_request_that_kills_the_engine_before_it_is_accepted_is_tried_twice() -> None:
    async def scene(client: EngineClient) -> None:
        waiting = asyncio.create_task(client.submit(submit("a")))
        await until(FakeChild.made[0].submits)
        FakeChild.made[0].die()
        await until(lambda: client.state == "restarting")
        second = await next_engine(2)
        [again] = second.submits()
        assert not again.again and again.params.seed is None
        second.die()
        with pytest.raises(ApiError) as caught:
            await waiting
        assert caught.value.code == "engine_error"
        assert (await next_engine(3)).submits() == []

    play(scene)


def test_who_comes_while_it_restarts_waits_for_the_next_one() -> None:
    async def scene(client: EngineClient) -> None:
        FakeChild.made[0].die()
        await until(lambda: client.state == "restarting")
        waiting, asking = asyncio.create_task(client.submit(submit("a"))), asyncio.create_task(client.plan(5))
        child = await next_engine(2)
        await until(lambda: len(child.received) == 2)
        [sent] = child.submits()
        assert not sent.again
        child.say(Accepted("a", 3), Answer(0, {"verdict": "fits"}))
        assert (await waiting).seed == 3 and await asking == {"verdict": "fits"}

    play(scene)


def test_who_waits_too_long_is_sent_away_and_never_run() -> None:
    async def scene(client: EngineClient) -> None:
        FakeChild.made[0].die()
        await until(lambda: client.state == "restarting")
        for call in (client.submit(submit("a")), client.plan(5)):
            with pytest.raises(ApiError) as caught:
                await call
            assert (caught.value.status, caught.value.code) == (503, "engine_restarting")
            assert caught.value.retry_after_s
        assert (await next_engine(2)).submits() == []

    play(scene, restart_wait_s=0.02)


def test_who_was_sent_to_an_engine_that_died_waits_for_the_next_as_long_as_it_takes() -> None:
    async def scene(client: EngineClient) -> None:
        waiting = asyncio.create_task(client.submit(submit("a")))
        await until(FakeChild.made[0].submits)
        FakeChild.made[0].die()
        await asyncio.sleep(0.1)
        assert not waiting.done()
        (await next_engine(2)).say(Accepted("a", 3))
        assert (await waiting).seed == 3

    play(scene, restart_wait_s=0.02)


def test_questions_that_die_with_the_engine_are_not_left_waiting() -> None:
    async def scene(client: EngineClient) -> None:
        asking = asyncio.create_task(client.plan(5))
        await until(lambda: client._queries)
        FakeChild.made[0].die()
        with pytest.raises(ApiError) as caught:
            await asking
        assert caught.value.code == "engine_restarting"

    play(scene)


def test_a_request_cancelled_while_there_is_no_engine_ends_at_once() -> None:
    async def scene(client: EngineClient) -> None:
        before, while_down = await running(client, "before"), await running(client, "down")
        client.cancel("before")
        FakeChild.made[0].die()
        assert [e.reason for e in (await outcome(before))[0]] == ["cancelled"]
        assert client.state == "restarting" and client.cancel("down")
        seen, _ = await outcome(while_down)
        assert seen[-1].reason == "cancelled"
        assert (await next_engine(2)).submits() == []

    play(scene)


def test_it_goes_on_trying_while_starts_fail_and_gives_up_when_they_always_will() -> None:
    async def scene(client: EngineClient) -> None:
        ticket = await running(client, "a")
        FakeChild.made[0].die()
        await until(lambda: client.state == "restarting")
        for number in (2, 3):
            (await next_engine(number, ready=False)).die()
        last = await next_engine(4, ready=False)
        assert client.state == "restarting" and client.restarts == 3
        last.say(Broken("the model is gone", user_error=True))
        last.die()
        _, error = await outcome(ticket)
        assert error is not None and "the model is gone" in error.message
        assert client.state == "failed"
        with pytest.raises(ApiError, match="the model is gone"):
            await client.submit(submit("b"))

    play(scene)


def test_stopping_in_the_middle_of_a_restart() -> None:
    async def scene(client: EngineClient) -> None:
        ticket = await running(client, "a")
        FakeChild.made[0].die()
        await next_engine(2, ready=False)
        await client.stop()
        _, error = await outcome(ticket)
        assert error is not None and error.code == "draining" and len(FakeChild.made) == 2

    play(scene)
