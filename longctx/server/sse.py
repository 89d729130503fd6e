"""Server-sent events: sent as they come, never silent for long, and ended when nobody reads them any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longctx.server.json_pieces import dumps

PING = b": ping\n\n"
"""A comment, which every client of server-sent events skips."""

DONE = b"data: [DONE]\n\n"

STALL_S = 120.0
"""A client that takes nothing for so long, its connection's buffers full, is given up."""

_LINE_BREAKS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""What JSON may leave as it is but some clients' line readers take for the end of a line."""

T = TypeVar("T")


def frame(value: dict[str, Any]) -> bytes:
    """One event; its name is the object's `type`, which only those of /v1/responses have."""
    data = f"data: {dumps(value).translate(_LINE_BREAKS)}\n\n"
    name = f"event: {value['type']}\n" if "type" in value else ""
    return (name + data).encode(errors="replace")


class Departure:
    """Notices that a client has left, whether or not there is something to send to it.

    Owns the rest of the request's messages: nobody else may receive after it was made. `close` it.
    """

    def __init__(self, receive: Receive):
        self._watch = asyncio.ensure_future(_until_disconnect(receive))

    @property
    def happened(self) -> bool:
        return self._watch.done()

    async def wait_for(self, *tasks: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
        """Wait until one of `tasks` is done, the client has left, or time is up; whether one is done."""
        await asyncio.wait({*tasks, self._watch}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return any(task.done() for task in tasks)

    async def race(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client leaves; `ClientDisconnect` then."""
        task = asyncio.ensure_future(work)
        try:
            if not await self.wait_for(task):
                raise ClientDisconnect
            return task.result()
        finally:
            await end(task)

    def close(self) -> None:
        self._watch.cancel()


async def end(task: asyncio.Future[Any]) -> None:
    """Cancel a task that may be done, and wait until it is."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response whose head leaves at once and whose events leave as they come.

    A frame is asked for when the one before it was taken, so a slow client holds up its source and nothing piles up
    here. A ping goes out whenever nothing else did for `ping_s`, by the clock of this process, whatever the engine
    does. When the client leaves, stalls, or the server ends it, the source is closed, which ends what feeds it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        departure: Departure,
        *,
        ping_s: float,
        headers: Mapping[str, str] | None = None,
    ):
        # Proxies that gather a response before they pass it on are asked not to.
        own = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        self.status_code = 200
        self.background = None
        self.init_headers({**own, **(headers or {})})
        self._frames = frames
        self._departure = departure
        self._ping_s = ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while (data := await self._next(send)) is not None:
                await self._send(send, _body(data))
            if not self._departure.happened:
                await self._send(send, _body(b"", more=False))
        except TimeoutError:
            pass  # nobody takes it: returning in the middle closes the connection
        finally:
            self._departure.close()
            await self._frames.aclose()

    async def _next(self, send: Send) -> bytes | None:
        """The next frame, pinging while it is not there; None at the end, or when the client has left."""
        task = asyncio.ensure_future(anext(self._frames, None))
        try:
            while not await self._departure.wait_for(task, timeout_s=self._ping_s):
                if self._departure.happened:
                    return None
                await self._send(send, _body(PING))
            return task.result()
        finally:
            await end(task)

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        async with asyncio.timeout(STALL_S):
            await send(message)


def _body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
