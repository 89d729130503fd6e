"""Event streams against a hand-made connection: order, pings, slow and vanishing clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from longctx.server import sse
from longctx.server.sse import PING, Departure, EventStream, frame


class Wire:
    """A client's connection by hand: `leave` ends it, `blocked` makes it take nothing."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self.taken = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        await self.open.wait()
        self.sent.append(message)
        self.taken.set()

    @property
    def body(self) -> list[bytes]:
        return [m["body"] for m in self.sent if m["type"] == "http.response.body" and m["body"]]


class Source:
    """Frames by hand; notes how many were asked for, and whether it was closed."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.asked = 0
        self.closed = False

    async def frames(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                self.asked += 1
                if (data := await self.queue.get()) is None:
                    return
                yield data
        finally:
            self.closed = True


def run(test: Callable[[Wire, Source, asyncio.Task[None]], Coroutine[Any, Any, None]], ping_s: float = 60.0) -> None:
    async def main() -> None:
        wire, source = Wire(), Source()
        stream = EventStream(source.frames(), Departure(wire.receive), ping_s=ping_s)
        task = asyncio.create_task(stream({"type": "http"}, wire.receive, wire.send))
        try:
            async with asyncio.timeout(20):
                await test(wire, source, task)
        finally:
            task.cancel()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_the_head_leaves_before_there_is_anything_to_say() -> None:
    async def test(wire: Wire, source: Source, task: asyncio.Task[None]) -> None:
        await until(lambda: bool(wire.sent))
        head = wire.sent[0]
        assert head["status"] == 200
        headers = dict(head["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert headers[b"cache-control"] == b"no-cache" and b"content-length" not in headers
        assert wire.body == []

    run(test)


def test_frames_in_order_and_an_end() -> None:
    async def test(wire: Wire, source: Source, task: asyncio.Task[None]) -> None:
        for data in (b"a", b"b", None):
            source.queue.put_nowait(data)
        await task
        assert wire.body == [b"a", b"b"] and wire.sent[-1]["more_body"] is False
        assert source.closed

    run(test)


def test_pings_only_while_nothing_else_is_sent() -> None:
    """ggml-org/llama.cpp#22997, vllm-project/vllm#47647: minutes of silence before the first token."""

    async def test(wire: Wire, source: Source, task: asyncio.Task[None]) -> None:
        await until(lambda: len(wire.body) == 3)
        assert wire.body == [PING] * 3
        source.queue.put_nowait(b"data")
        await until(lambda: b"data" in wire.body)
        assert wire.body.count(b"data") == 1
        assert all(data in (PING, b"data") for data in wire.body), "pings are not mixed into frames"

    run(test, ping_s=0.02)


def test_no_pings_before_their_time() -> None:
    async def test(wire: Wire, source: Source, task: asyncio.Task[None]) -> None:
        for _ in range(20):
            source.queue.put_nowait(b"x")
            await asyncio.sleep(0.01)
        assert PING not in wire.body

    run(test, ping_s=5.0)


def test_a_client_that_leaves_ends_the_source_though_nothing_is_written() -> None:
    """antirez/ds4#333: a disconnect was noticed only when there was output to write."""

    async def test(wire: Wire, source: Source, task: asyncio.Task[None]) -> None:
        await until(lambda: bool(wire.sent))
        wire.gone.set()
        await task
        assert source.closed and wire.body == []

    run(test)


def test_a_slow_client_holds_up_the_source() -> None:
    async def test(wire: Wire, source: Source, task: asyncio.Task[None]) -> None:
        await until(lambda: bool(wire.sent))
        wire.open.clear()
        for i in range(100):
            source.queue.put_nowait(b"%d" % i)
        await asyncio.sleep(0.05)
        assert source.asked <= 2
        wire.open.set()
        source.queue.put_nowait(None)
        await task
        assert wire.body == [b"%d" % i for i in range(100)]

    run(test)


def test_a_client_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "STALL_S", 0.05)

    async def test(wire: Wire, source: Source, task: asyncio.Task[None]) -> None:
        await until(lambda: bool(wire.sent))
        wire.open.clear()
        source.queue.put_nowait(b"x")
        await task
        assert source.closed
        assert wire.sent[-1]["type"] == "http.response.start", "the answer is not called complete"

    run(test)


def test_an_ended_server_ends_the_source() -> None:
    async def test(wire: Wire, source: Source, task: asyncio.Task[None]) -> None:
        await until(lambda: source.asked == 1)
        task.cancel()
        await asyncio.wait([task])
        assert source.closed

    run(test)


def test_race_cancels_work_when_the_client_leaves() -> None:
    async def main() -> None:
        wire, ended = Wire(), []

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0)
                ended.append(True)

        departure = Departure(wire.receive)
        racing = asyncio.create_task(departure.race(work()))
        await asyncio.sleep(0.01)
        wire.gone.set()
        with pytest.raises(ClientDisconnect):
            await racing
        assert ended == [True], "its clean-up has happened by then"
        assert await Departure(Wire().receive).race(asyncio.sleep(0, "x")) == "x"

    asyncio.run(main())


def test_frames_are_lines_for_every_reader() -> None:
    value = {"text": "a\nb\r\u2028c\u2029d\u0085e é 🦜"}
    data = frame(value)
    assert data.endswith(b"\n\n") and len(data.decode().splitlines()) == 2
    assert json.loads(data.decode().removeprefix("data: ")) == value
    named = frame({"type": "response.created", "n": 1}).decode().split("\n")
    assert named[0] == "event: response.created" and json.loads(named[1].removeprefix("data: "))["n"] == 1
