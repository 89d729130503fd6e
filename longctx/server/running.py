"""One HTTP request's engine work: the events of all its choices, in one stream, with its deadline."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from longctx.events import Event, FinishEvent, ProgressEvent
from longctx.server.errors import ApiError
from longctx.server.registry import Record, Registry
from longctx.server.ticket import Restarted, Ticket

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longctx.server.client import EngineClient
    from longctx.server.metrics import Metrics
    from longctx.server.work import Prepared


log = logging.getLogger(__name__)


class Running:
    """The engine requests of one HTTP request, one per choice.

    Tasks of its own read the tickets, so registry and metrics are current whether or not anyone reads `events`, and a
    cancelled request is followed to its real end. Of progress that waits to be read only the latest is kept. When
    `deadline_s` (on the event loop's clock) passes, all choices are cancelled and `events` raises. `id` is also the
    record's. Used from the event loop only.
    """

    def __init__(
        self,
        prepared: Prepared,
        record: Record,
        tickets: list[Ticket],
        *,
        client: EngineClient,
        registry: Registry,
        metrics: Metrics,
        tokenizer: PreTrainedTokenizerBase | None = None,
        deadline_s: float | None = None,
        on_end: Callable[[Running], None] | None = None,
    ):
        self.id = record.id
        self.created = record.created
        self.prepared = prepared
        self.record = record
        self.tokenizer = tokenizer
        self.seeds = [ticket.seed for ticket in tickets]
        self.finished = False
        self._tickets = tickets
        self._client = client
        self._registry = registry
        self._metrics = metrics
        self._on_end = on_end
        self._open = len(tickets)
        self._cancelled = False
        self._events: deque[tuple[int, Event | Restarted] | ApiError | None] = deque()
        self._arrived = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._follow(choice)) for choice in range(len(tickets))]
        self._alarm = None if deadline_s is None else loop.call_at(deadline_s, self._pass_deadline)

    async def events(self) -> AsyncIterator[tuple[int, Event | Restarted]]:
        """(choice, event) of all choices as they come; ends when every choice has.

        Raises `ApiError` when a choice failed or the deadline passed; the other choices are cancelled then, as they are
        when the reader stops early.
        """
        try:
            while True:
                while not self._events:
                    self._arrived.clear()
                    await self._arrived.wait()
                item = self._events.popleft()
                if item is None:
                    return
                if isinstance(item, ApiError):
                    raise item
                yield item
        finally:
            if not self.finished:
                self.cancel()

    def deliver(self, choice: int) -> None:
        """A generated token of this choice goes to the client now: it must not be run again from its start."""
        self._tickets[choice].delivered = True

    def cancel(self) -> None:
        """End every choice that still runs, between two layers. May be called again."""
        self.record.cancel_wanted = True
        if not self._cancelled:
            self._cancelled = True
            for choice, state in enumerate(self.record.choices):
                if state.finish is None:
                    self._client.cancel(self._tickets[choice].submit.request_id)

    async def _follow(self, choice: int) -> None:
        """Read one ticket to its end."""
        try:
            async for event in self._tickets[choice]:
                self._registry.observe(self.record, choice, event)
                self._metrics.observe_event(self.record, event)
                if isinstance(event, FinishEvent) and event.reason == "error":
                    raise ApiError.from_code("engine_error", event.error or "the engine failed")
                self._put(choice, event)
        except ApiError as error:
            if self.record.choices[choice].finish is None:
                self._metrics.observe_error(self.record, self._tickets[choice].submit.request_id)
            self._fail(error)
        except Exception as error:
            log.exception("a request's events could not be followed")
            self._fail(ApiError.from_code("engine_error", f"the server failed: {type(error).__name__}"))
        finally:
            self._open -= 1
            if not self._open:
                self._end()

    def _put(self, choice: int, event: Event | Restarted) -> None:
        if isinstance(event, Restarted):
            # What nobody has read yet will come again; what was read was either delivered or is forgotten.
            kept = [item for item in self._events if not (isinstance(item, tuple) and item[0] == choice)]
            self._events = deque(kept)
        elif isinstance(event, ProgressEvent) and self._events:
            last = self._events[-1]
            if isinstance(last, tuple) and last[0] == choice and isinstance(last[1], ProgressEvent):
                self._events.pop()
        self._events.append((choice, event))
        self._arrived.set()

    def _fail(self, error: ApiError) -> None:
        self._events.append(error)
        self._arrived.set()
        outcome = "cancelled" if error.code == "cancelled" else "error"
        self._registry.close(self.record, outcome, error.message)
        self.cancel()

    def _pass_deadline(self) -> None:
        self._fail(ApiError.from_code("deadline_exceeded", "the request's deadline passed before its answer was done"))

    def _end(self) -> None:
        self.finished = True
        if self._alarm is not None:
            self._alarm.cancel()
        cancelled = any(c.finish is None or c.finish.reason == "cancelled" for c in self.record.choices)
        self._registry.close(self.record, "cancelled" if cancelled else "finished")
        self._events.append(None)
        self._arrived.set()
        if self._on_end is not None:
            self._on_end(self)
