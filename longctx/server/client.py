"""The HTTP process's hold on the engine: submit, cancel, ask; an engine that dies is started again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from longctx.config import EngineConfig
from longctx.errors import EngineError, LongctxError
from longctx.events import FinishEvent
from longctx.server.child import Child
from longctx.server.errors import ApiError
from longctx.server.messages import (
    Accepted,
    Answer,
    Broken,
    Cancel,
    EngineStats,
    FromEngine,
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

__all__ = ["EngineClient", "Restarted", "Ticket"]

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
"""A request that was running at two deaths of the engine may be their cause."""

RESTART_WAIT_S = 30.0
STOP_WAIT_S = 10.0
LONGEST_PAUSE_S = 30.0
RETRY_AFTER_S = 5.0


class EngineClient:
    """Owns the engine's process and every request in it. Used from one event loop.

    `state` is "starting", "ready", "restarting", "stopping" or "failed"; only a start that would fail the same way
    again, or the very first one, ends in "failed". When the process dies, requests of which nothing was delivered run
    again in the next one, in their order and with their seeds, once each; the others fail. `on_stats`, if set, is
    called with every snapshot of an engine.
    """

    def __init__(
        self, config: EngineConfig, *, restart_wait_s: float = RESTART_WAIT_S, stop_wait_s: float = STOP_WAIT_S
    ):
        self._config = config
        self._restart_wait_s = restart_wait_s
        self._stop_wait_s = stop_wait_s
        self.state = "starting"
        self.info: ModelInfo | None = None
        self.stats: EngineStats | None = None
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.loading: Loading | None = None
        self.restarts = 0
        self.last_failure: str | None = None
        self._child: Child | None = None
        self._broken: Broken | None = None
        self._tickets: dict[str, Ticket] = {}
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._query_ids = itertools.count()
        self._changed = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The engine process's id while there is one."""
        return self._child.pid if self._child is not None else None

    async def start(self) -> None:
        """Start the process; returns when it takes requests.

        Raises what the model or the machine is to blame for as `LongctxError`, anything else as `EngineError`.
        """
        assert self._supervisor is None, "started twice"
        self._supervisor = asyncio.create_task(self._supervise())
        while self.state == "starting":
            await self._change()
        if self.state == "failed":
            assert self.last_failure is not None
            kind = LongctxError if self._broken is not None and self._broken.user_error else EngineError
            raise kind(self.last_failure)

    async def stop(self) -> None:
        """Cancel what runs, let the engine save what it measured, and see its process end, by force if need be."""
        if self.state != "failed":
            self._enter("stopping")
        child = self._child
        if child is not None and not child.ended.done():
            child.post(Stop())
            await asyncio.wait([child.ended], timeout=self._stop_wait_s)
            child.kill()
        if self._supervisor is not None:
            await asyncio.wait([self._supervisor])

    # -- requests ------------------------------------------------------------------------------------------------

    async def submit(self, submit: Submit) -> Ticket:
        """Queue a request; returns when the engine has checked and accepted it.

        Raises `ApiError`: the engine's refusal, or 503 when there was no engine and none comes in time. A request that
        was sent to one which then died waits for the next one as long as it takes, as accepted ones do.
        """
        assert submit.request_id not in self._tickets, f"two requests with the id {submit.request_id}"
        self._check_open()
        ticket = Ticket(submit, self.cancel)
        self._tickets[ticket.id] = ticket
        limit_s = None if self.state == "ready" else self._restart_wait_s
        if self.state == "ready":
            self._send(ticket)
        try:
            async with asyncio.timeout(limit_s):
                await ticket.accepted
        except TimeoutError:
            self._abandon(ticket)
            raise _restarting() from None
        except asyncio.CancelledError:
            self._abandon(ticket)
            raise
        return ticket

    def cancel(self, request_id: str) -> bool:
        """End a request between two layers; its `FinishEvent` follows. False if it is not alive."""
        ticket = self._tickets.get(request_id)
        if ticket is None:
            return False
        ticket.cancelled = True
        if self.state == "ready":
            assert self._child is not None
            self._child.post(Cancel(request_id))
        else:
            self._end_cancelled(ticket)
        return True

    async def plan(self, tokens: int, *, concurrency: int = 1) -> dict[str, Any]:
        """The engine's plan for `concurrency` requests of `tokens` tokens (prompt + generated), as JSON."""
        return await self._ask("plan", tokens=tokens, concurrency=concurrency)

    async def _ask(self, kind: str, **args: Any) -> Any:
        self._check_open()
        try:
            async with asyncio.timeout(self._restart_wait_s):
                while self.state != "ready":
                    await self._change()
                    self._check_open()
                assert self._child is not None
                query_id = next(self._query_ids)
                answer = self._queries[query_id] = asyncio.get_running_loop().create_future()
                self._child.post(Query(query_id, kind, args))
                return await answer
        except TimeoutError:
            raise _restarting() from None

    def _check_open(self) -> None:
        if self.state in ("failed", "stopping"):
            raise self._closed()

    def _closed(self) -> ApiError:
        """Why nothing runs any more."""
        if self.state == "stopping":
            return ApiError.from_code("draining", "the server is stopping")
        return ApiError.from_code("engine_error", f"the engine cannot be started: {self.last_failure}")

    def _send(self, ticket: Ticket) -> None:
        assert self._child is not None
        submit, ticket.attempts = ticket.submit, ticket.attempts + 1
        if ticket.accepted.done():
            submit = replace(submit, params=replace(submit.params, seed=ticket.seed), again=True)
        self._child.post(submit)

    def _abandon(self, ticket: Ticket) -> None:
        """Nobody waits for this ticket any more."""
        self.cancel(ticket.id)
        self._tickets.pop(ticket.id, None)

    def _end_cancelled(self, ticket: Ticket) -> None:
        self._tickets.pop(ticket.id, None)
        ticket.put(cancelled_event(ticket.submit))
        if not ticket.accepted.done():
            ticket.accepted.set_exception(ApiError(499, "the request was cancelled", code="cancelled"))

    def _fail(self, ticket: Ticket, error: ApiError) -> None:
        self._tickets.pop(ticket.id, None)
        if ticket.accepted.done():
            ticket.put(error)
        else:
            ticket.accepted.set_exception(error)

    # -- what the engine says ------------------------------------------------------------------------------------

    def _on_messages(self, batch: list[FromEngine]) -> None:
        for message in batch:
            self._on_message(message)

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Happened):
            event = message.event
            ticket = self._tickets.get(event.request_id)
            if ticket is not None:
                ticket.put(event)
            if isinstance(event, FinishEvent):
                self._tickets.pop(event.request_id, None)
        elif isinstance(message, Accepted):
            if (ticket := self._tickets.get(message.request_id)) is not None:
                ticket.seed = message.seed
                if not ticket.accepted.done():
                    ticket.accepted.set_result(None)
        elif isinstance(message, Refused):
            if (ticket := self._tickets.get(message.request_id)) is not None:
                # An engine that stops refuses everything, which says nothing about the request.
                stopping = self.state == "stopping"
                self._fail(ticket, self._closed() if stopping else ApiError.from_code(message.code, message.message))
        elif isinstance(message, EngineStats):
            self.stats = message
            if self.on_stats is not None:
                self.on_stats(message)
        elif isinstance(message, Answer):
            self._on_answer(message)
        elif isinstance(message, Loading):
            self.loading = message
        elif isinstance(message, Ready):
            self._on_ready(message)
        else:
            self._broken = message

    def _on_answer(self, answer: Answer) -> None:
        waiter = self._queries.pop(answer.query_id)
        if waiter.done():
            return
        if answer.error is None:
            waiter.set_result(answer.value)
        else:
            waiter.set_exception(ApiError.from_code(answer.code or "engine_error", answer.error))

    def _on_ready(self, ready: Ready) -> None:
        self.info, self.loading = ready.info, None
        if self.state not in ("starting", "restarting"):
            return
        self._enter("ready")
        for ticket in list(self._tickets.values()):
            self._send(ticket)

    # -- its life ------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        failures = 0
        while self.state not in ("stopping", "failed"):
            self._broken = None
            self.loading = Loading("starting the engine", 0, 1)
            try:
                self._child = Child(self._config, self._on_messages)
                status = await self._child.ended
            except OSError as error:
                status = f"it could not be started: {error}"
            failures = 0 if self.state == "ready" else failures + 1
            self._on_death(status)
            if failures and self.state == "restarting":
                # An engine that dies while it loads is given ever longer pauses.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(2.0 ** (failures - 1), LONGEST_PAUSE_S)):
                        await self._change()
        for ticket in list(self._tickets.values()):
            self._fail(ticket, self._closed())
        self._fail_queries(self._closed())

    def _on_death(self, status: str) -> None:
        if self.state == "stopping":
            return
        reason = self._broken.message if self._broken is not None else f"the engine process ended: {status}"
        self.last_failure, first = reason, self.state == "starting"
        if first or (self._broken is not None and self._broken.user_error):
            log.error("the engine cannot be started: %s", reason)
            self._enter("failed")
            return
        self.restarts += 1
        self.stats = None
        self._enter("restarting")
        again = [ticket for ticket in list(self._tickets.values()) if self._survives(ticket, reason)]
        log.error("the engine died (%s); starting it again with %d requests that run again", reason, len(again))
        self._fail_queries(_restarting())

    def _survives(self, ticket: Ticket, reason: str) -> bool:
        """Keep a ticket for the next engine, or end it."""
        if ticket.cancelled:
            self._end_cancelled(ticket)
        elif ticket.delivered or ticket.attempts >= MAX_ATTEMPTS:
            message = f"the engine died while this request was running ({reason}); send it again"
            self._fail(ticket, ApiError.from_code("engine_error", message))
        else:
            if ticket.attempts:
                ticket.put(Restarted(ticket.id))
            return True
        return False

    def _fail_queries(self, error: ApiError) -> None:
        queries, self._queries = self._queries, {}
        for waiter in queries.values():
            if not waiter.done():
                waiter.set_exception(error)

    def _enter(self, state: str) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        """Wait for the next change of `state`."""
        await self._changed.wait()


def _restarting() -> ApiError:
    return ApiError.from_code("engine_restarting", "the engine is being restarted; try again", RETRY_AFTER_S)
