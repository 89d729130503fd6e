"""Drives an engine in a thread of its own: requests go in as messages, events come out per request."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

from longctx.engine import Engine
from longctx.errors import EngineError, LongctxError, RequestError
from longctx.events import Event, FinishEvent, ProgressEvent
from longctx.kv.groups import formats_text
from longctx.rates import rates_path
from longctx.request import Request

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_MS = 50.0
QUEUE_INTERVAL_S = 0.5
"""Places in the queue are told so often at most: with a thousand waiting, that is as many events each time."""

IDLE_CHECK_S = 1.0
"""The cache is checked when nothing has happened for so long: nobody's request waits for the end of it."""


Sink = Callable[[Event | Exception], None]
"""Takes the events of a request, in order, on the stepping thread: it must not block."""


class Subscription:
    """The events of one request, in order. Iterating ends after its `FinishEvent`.

    With a `sink` they go there instead, and there is nothing to iterate.
    """

    def __init__(self, request: Request, sink: Sink | None = None):
        self.request = request
        self.finished = False
        self._events: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
        self._sink: Sink = sink or self._events.put
        self._last: ProgressEvent | None = None

    def put(self, event: Event | Exception) -> None:
        # Layers can follow each other faster than anyone reads: thin out progress, never anything else.
        if isinstance(event, ProgressEvent) and (event.processed < event.total or event.stage == "queued"):
            last, self._last = self._last, event
            if last is not None and last.stage == event.stage and event.time_ms - last.time_ms < PROGRESS_INTERVAL_MS:
                self._last = last
                return
        self._sink(event)

    def __iter__(self) -> Iterator[Event]:
        while not self.finished:
            event = self._events.get()
            self.finished = isinstance(event, FinishEvent | Exception)
            if isinstance(event, Exception):
                raise event
            yield event


class EngineLoop:
    """Owns the stepping thread. Methods may be called from any thread.

    Between steps it takes new requests from its inbox, so a caller never waits for a step; when the engine stays idle
    it checks the cache's integrity once and sleeps. Every subscription ends: with its `FinishEvent`, or, if the engine
    breaks, with an `EngineError`, which every later `submit` raises too.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._inbox: queue.SimpleQueue[Subscription | None] = queue.SimpleQueue()
        # Reentrant: the garbage collector may close this engine while its own thread holds the lock.
        self._lock = threading.RLock()
        self._open: dict[str, Subscription] = {}
        self._num_inbox = 0
        self._unchecked = False
        self._ended: Exception | None = None
        self.failure: EngineError | None = None
        engine.on_progress = self._deliver
        self._thread = threading.Thread(target=self._main, name="longctx-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        request: Request,
        sink: Sink | None = None,
        *,
        on_queued: Callable[[], None] | None = None,
        bounded: bool = True,
    ) -> Subscription:
        """Hand a request over; its events go to `sink`, or arrive on the subscription.

        `on_queued` is called when the request is certain to run, before its first event, which tells its place in the
        queue and comes at once, whatever the engine is doing. Raises `QueueFullError` when
        the queue is full, unless it is not `bounded`.
        """
        subscription = Subscription(request, sink)
        with self._lock:
            if self._ended is not None:
                raise type(self._ended)(str(self._ended)) from self._ended.__cause__
            if request.id in self._open:
                raise RequestError(f"a request called {request.id!r} is running: choose another id")
            if bounded:
                self._engine.scheduler.check_queue(self._num_inbox)
            if on_queued is not None:
                on_queued()
            place = self._engine.scheduler.num_queued + self._num_inbox + 1
            subscription.put(request.progress(time.perf_counter(), 0, None, place))
            self._open[request.id] = subscription
            self._num_inbox += 1
            self._inbox.put(subscription)
        return subscription

    def cancel(self, request_id: str) -> bool:
        """Ask for a request to end; its `FinishEvent` follows within a layer's time. False if it is not alive."""
        with self._lock:
            subscription = self._open.get(request_id)
            if subscription is not None:
                subscription.request.cancelled = True
        return subscription is not None

    def stop(self) -> None:
        """End the thread within a layer's time; open requests are cancelled. May be called again, and by the thread."""
        with self._lock:
            if self._ended is None:
                self._ended = LongctxError("this engine was closed: make a new one")
                for subscription in self._open.values():
                    subscription.request.cancelled = True
        self._inbox.put(None)
        # The garbage collector may call from any thread, the engine's own too.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def wait(self) -> None:
        """Block until the stepping thread has ended; `failure` says whether it broke."""
        self._thread.join()

    def close(self) -> None:
        """`stop`, and keep the step times that the engine learned."""
        self.stop()
        try:
            self._engine.rates.save(rates_path(self._engine.loaded.spec, formats_text(self._engine.groups)))
        except OSError as error:
            log.warning("measured step times were not saved: %s", error)

    @property
    def num_open(self) -> int:
        """Requests that have not ended, those in the inbox included."""
        return len(self._open)

    def _main(self) -> None:
        try:
            next_places_s = 0.0
            while self._take_messages():
                if (now_s := time.monotonic()) >= next_places_s:
                    next_places_s = now_s + QUEUE_INTERVAL_S
                    for event in self._engine.scheduler.queue_progress():
                        self._deliver(event)
                for event in self._engine.step():
                    self._deliver(event)
                self._unchecked = True
            for event in self._engine.scheduler.drop_cancelled():
                self._deliver(event)
        except BaseException as error:
            log.exception("the engine has stopped")
            failure = EngineError(f"the engine has stopped: {type(error).__name__}: {error}")
            failure.__cause__ = error
            with self._lock:
                self._ended = self.failure = failure
                abandoned, self._open = list(self._open.values()), {}
            for subscription in abandoned:
                subscription.put(failure)

    def _take_messages(self) -> bool:
        """Take what is in the inbox, waiting for something when there is no work; False means stop."""
        while not self._inbox.empty() or not self._engine.has_work:
            try:
                subscription = self._inbox.get(timeout=IDLE_CHECK_S if self._unchecked else None)
            except queue.Empty:
                self._engine.check_integrity()
                self._unchecked = False
                continue
            if subscription is None:
                return False
            with self._lock:
                self._num_inbox -= 1
                self._engine.submit(subscription.request, bounded=False)
        return True

    def _deliver(self, event: Event) -> None:
        # Whoever steps the engine by hand as well has requests that nobody subscribed to.
        is_last = isinstance(event, FinishEvent)
        subscription = self._close(event.request_id) if is_last else self._open.get(event.request_id)
        if subscription is not None:
            subscription.put(event)

    def _close(self, request_id: str) -> Subscription | None:
        with self._lock:
            return self._open.pop(request_id, None)
