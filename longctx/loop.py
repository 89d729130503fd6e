"""Drives an engine in a thread of its own: requests go in as messages, events come out per request."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from longctx.engine import Engine
from longctx.errors import EngineError, LongctxError
from longctx.events import Event, FinishEvent, ProgressEvent
from longctx.request import Request

PROGRESS_INTERVAL_MS = 50.0


class Subscription:
    """The events of one request, in order. Iterating ends after its `FinishEvent`."""

    def __init__(self, request: Request):
        self.request = request
        self.finished = False
        self._events: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
        self._last_progress_ms = -PROGRESS_INTERVAL_MS

    def put(self, event: Event | Exception) -> None:
        # Layers can follow each other faster than anyone reads: thin out progress, never anything else.
        if isinstance(event, ProgressEvent) and event.processed < event.total:
            if event.time_ms - self._last_progress_ms < PROGRESS_INTERVAL_MS:
                return
            self._last_progress_ms = event.time_ms
        self._events.put(event)

    def __iter__(self) -> Iterator[Event]:
        while not self.finished:
            event = self._events.get()
            self.finished = isinstance(event, FinishEvent | Exception)
            if isinstance(event, Exception):
                raise event
            yield event


class EngineLoop:
    """Owns the stepping thread. Methods may be called from any thread.

    Between steps it takes new requests from its inbox, so a caller never waits for a step; when the engine goes idle it
    checks the cache's integrity and sleeps. If the engine breaks, every open subscription raises `EngineError`, and so
    does every later `submit`.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._inbox: queue.SimpleQueue[Subscription | None] = queue.SimpleQueue()
        self._open: dict[str, Subscription] = {}
        self._failure: Exception | None = None
        engine.on_progress = self._deliver
        self._thread = threading.Thread(target=self._main, name="longctx-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Subscription:
        """Hand a request over; its events arrive on the subscription."""
        if self._failure is not None:
            raise EngineError(f"the engine has stopped: {self._failure}") from self._failure
        subscription = Subscription(request)
        self._inbox.put(subscription)
        return subscription

    def cancel(self, request: Request) -> None:
        """Ask for a request to end; its `FinishEvent` follows within a layer's time."""
        request.cancelled = True

    def stop(self) -> None:
        """End the thread after its current step; open requests are cancelled."""
        for subscription in list(self._open.values()):
            subscription.request.cancelled = True
        self._inbox.put(None)
        self._thread.join()

    def _main(self) -> None:
        try:
            while self._take_messages():
                for event in self._engine.scheduler.queue_progress() + self._engine.step():
                    self._deliver(event)
                if not self._engine.has_work:
                    self._engine.check_integrity()
        except Exception as error:
            self._failure = error
            for subscription in self._open.values():
                subscription.put(EngineError(f"the engine has stopped: {error}"))

    def _take_messages(self) -> bool:
        """Take what is in the inbox, waiting for something when there is no work; False means stop."""
        while not self._inbox.empty() or not self._engine.has_work:
            subscription = self._inbox.get()
            if subscription is None:
                return False
            try:
                self._engine.submit(subscription.request)
            except LongctxError as error:
                subscription.put(error)
            else:
                self._open[subscription.request.id] = subscription
        return True

    def _deliver(self, event: Event) -> None:
        if isinstance(event, FinishEvent):
            self._open.pop(event.request_id).put(event)
        else:
            self._open[event.request_id].put(event)
