"""One request as the HTTP side holds it: its events in order, also across the death of an engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from longctx.events import Event, FinishEvent, ProgressEvent, Timings, Usage
from longctx.server.errors import ApiError
from longctx.server.messages import Submit


@dataclass(frozen=True)
class Restarted:
    """The engine died and this request begins again: forget the tokens that came so far."""

    request_id: str


class Ticket:
    """The events of one request. Iterate it once; it ends after the `FinishEvent`.

    `seed` is the one its draws use, a second time too, known once it is accepted. Whoever sends a generated token to a
    client sets `delivered` first: what somebody has read is not generated again, so the death of the engine is then an
    `ApiError`. Events that nobody has read yet are forgotten when the engine dies. `give_up` cancels the request by
    its id.
    """

    def __init__(self, submit: Submit, give_up: Callable[[str], object]):
        self.submit = submit
        self._give_up = give_up
        self.seed = -1
        self.delivered = False
        self.cancelled = False
        self.attempts = 0
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events: deque[Event | Restarted | ApiError] = deque()
        self._arrived = asyncio.Event()
        self._ended = False

    @property
    def id(self) -> str:
        return self.submit.request_id

    def put(self, event: Event | Restarted | ApiError) -> None:
        """Add an event. Of progress that waits to be read only the latest is kept: a reader may be slow."""
        if isinstance(event, Restarted | ApiError):
            self._events.clear()
        elif isinstance(event, ProgressEvent) and self._events and isinstance(self._events[-1], ProgressEvent):
            self._events.pop()
        self._events.append(event)
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[Event | Restarted]:
        return self

    async def __anext__(self) -> Event | Restarted:
        if self._ended:
            raise StopAsyncIteration
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Restarted) and self.delivered:
            # A token left between the engine's death and its news.
            self._give_up(self.id)
            event = ApiError.from_code("engine_error", "the engine died while this answer was being sent")
        self._ended = isinstance(event, FinishEvent | ApiError)
        if isinstance(event, ApiError):
            raise event
        return event


def cancelled_event(submit: Submit) -> FinishEvent:
    """The end of a request that was cancelled while no engine had it."""
    return FinishEvent(
        submit.request_id,
        "cancelled",
        "",
        (),
        Usage(len(submit.token_ids), 0, 0, {"g1": 0}),
        Timings(0.0, 0.0, 0.0, 0.0, 0.0),
        0,
    )
