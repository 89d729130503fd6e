"""Everything a route needs: the engine's client, the preparer, what runs, and `begin`, the way of every request."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING

from longctx.server.errors import ApiError
from longctx.server.logs import excerpt, log_event
from longctx.server.messages import ModelInfo, Submit
from longctx.server.registry import ChoiceState, Record, Registry
from longctx.server.running import Running
from longctx.server.settings import ServerSettings
from longctx.server.tenant import salt_for

if TYPE_CHECKING:
    from longctx.server.client import EngineClient
    from longctx.server.jobs import Jobs
    from longctx.server.metrics import Metrics
    from longctx.server.prepare_pool import Preparer
    from longctx.server.ticket import Ticket
    from longctx.server.work import Prepared, ReplyOptions, Work

log = logging.getLogger(__name__)

LONGEST_RETRY_S = 600.0
GUESSED_START_S = 10.0


class Service:
    """The parts of the HTTP process, and the one way a request takes through them.

    `jobs` is set by whoever builds the service, since jobs begin requests themselves. `settled` is set when requests
    are taken, or when the `failure` is known that prevents it. `starting` is the client's start if it has begun. Used
    from one event loop.
    """

    jobs: Jobs

    def __init__(
        self,
        settings: ServerSettings,
        client: EngineClient,
        preparer: Preparer,
        metrics: Metrics,
        starting: asyncio.Task[None] | None = None,
    ):
        self.settings = settings
        self.client = client
        self.preparer = preparer
        self.metrics = metrics
        # Every snapshot, not only those that are there when somebody asks: an engine's last steps count too.
        client.on_stats = metrics.observe_stats
        self.registry = Registry(settings.max_tracked)
        self.running: dict[str, Running] = {}
        self.created = int(time.time())
        self.started_s = time.monotonic()
        self.start_seconds: float | None = None
        self.settled = asyncio.Event()
        self.failure: Exception | None = None
        self._drain_until_s: float | None = None
        self._starting = starting
        self._stopping: asyncio.Future[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        return self._drain_until_s is not None

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be taken."""
        return self.start_seconds is not None and self.client.state == "ready" and not self.draining

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.settings.served_name or self.need_info().model

    def need_info(self) -> ModelInfo:
        """The loaded model; the `ApiError` of a server that has none yet."""
        if self.client.info is None:
            self.check_open()
            raise self._loading_error()
        return self.client.info

    async def start(self) -> None:
        """Start the engine and what prepares for it; `settled` and `failure` tell how it went."""
        try:
            # Jobs first: what earlier ones answered can be read while the model loads, a bad folder is told at once.
            await self.jobs.start()
            await (self.client.start() if self._starting is None else self._starting)
            await self.preparer.start(self.need_info())
            self.start_seconds = time.monotonic() - self.started_s
        except Exception as error:
            self.failure = error
        finally:
            self.settled.set()

    async def stop(self) -> None:
        """Persist the jobs, end the engine and the preparers. May be called again: there is one stop."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        await self.jobs.stop()
        await asyncio.gather(self.client.stop(), self.preparer.stop())

    async def begin(
        self,
        endpoint: str,
        body: bytes | bytearray,
        *,
        tenant: str | None,
        request_id: str,
        alias: str | None = None,
        is_job: bool = False,
        checked: asyncio.Future[ReplyOptions] | None = None,
    ) -> Running:
        """Prepare a body ("completions", "chat", "responses"), submit its choices and register it; raises `ApiError`.

        The server's own time limit does not hold for jobs; a limit inside the body always does. `checked`, if given, is
        told the options as soon as the fields are in order, before the text is read.
        """
        self.check_open()
        loop = asyncio.get_running_loop()
        arrival_s, limit_s = loop.time(), None if is_job else self.settings.request_timeout_s
        record = self.registry.open(request_id, endpoint, tenant, alias)
        if self.settings.log_prompts:
            log_event(log, "a request came", request=request_id, endpoint=endpoint, body=excerpt(body))
        self._idle.clear()
        try:
            async with asyncio.timeout(limit_s):
                if checked is not None:
                    checked.set_result(await self.preparer.check(endpoint, body))
                prepared = await self.preparer.prepare(endpoint, body)
                own_s = prepared.options.timeout_s
                limit_s = min((s for s in (limit_s, own_s) if s is not None), default=None)
            deadline_s = None if limit_s is None else arrival_s + limit_s
            async with asyncio.timeout_at(deadline_s):
                tickets = await self._submit_all(record, prepared, tenant)
        except TimeoutError:
            error = ApiError.from_code("deadline_exceeded", "the request's deadline passed before it was queued")
            self._refuse(record, error)
            raise error from None
        except ApiError as error:
            self._refuse(record, error)
            raise
        except BaseException:
            self._refuse(record, None)
            raise
        running = Running(
            prepared,
            record,
            tickets,
            client=self.client,
            registry=self.registry,
            metrics=self.metrics,
            tokenizer=self.preparer.tokenizer,
            deadline_s=deadline_s,
            on_end=self._forget,
        )
        self.running[running.id] = running
        if record.cancel_wanted:
            running.cancel()
        return running

    def cancel(self, record: Record) -> None:
        """End a live record's work, even while its prompt is still being read or waits for an engine."""
        record.cancel_wanted = True
        if (running := self.running.get(record.id)) is not None:
            running.cancel()
        elif not record.finished:
            for choice in range(len(record.choices)):
                self.client.cancel(_engine_id(record.id, choice))

    def check_open(self) -> None:
        """Raise the `ApiError` of a server that takes no requests now, with the time after which it may."""
        if self._drain_until_s is not None:
            left_s = self._drain_until_s - time.monotonic()
            raise ApiError.from_code("draining", "the server is shutting down", retry_after(left_s))
        state = self.client.state
        if state == "starting" or (self.start_seconds is None and state == "ready"):
            raise self._loading_error()
        if state in ("failed", "stopping"):
            why = self.client.last_failure or "it was stopped"
            raise ApiError(503, f"the engine is not running: {why}", type="server_error", code="engine_unavailable")

    def _loading_error(self) -> ApiError:
        left_s = retry_after(self._start_left_s())
        return ApiError(
            503, "the model is still loading", type="server_error", code="model_loading", retry_after_s=left_s
        )

    def _start_left_s(self) -> float:
        """Estimate of what is left of the start: at the pace of the bytes loaded so far, a guess before."""
        spent_s, loading = time.monotonic() - self.started_s, self.client.loading
        if loading is None or not loading.total or not loading.done:
            return GUESSED_START_S
        return spent_s * max(0.0, loading.total / loading.done - 1)

    def drain(self, seconds: float) -> None:
        """Take no requests from now on; those that run have `seconds`."""
        self._drain_until_s = time.monotonic() + seconds

    def cancel_all(self) -> None:
        """End all that runs."""
        for record in self.registry.live():
            self.cancel(record)

    async def wait_idle(self) -> None:
        """Until no request is being prepared or run."""
        await self._idle.wait()

    async def _submit_all(self, record: Record, prepared: Prepared, tenant: str | None) -> list[Ticket]:
        """Hand over all choices at once; if one is refused, the others are cancelled."""
        salt = salt_for(tenant, prepared.options.cache_salt)
        choices = [ChoiceState(len(w.token_ids), w.params.max_tokens) for w in prepared.works]
        self.registry.queued(record, choices, prepared.options.n)
        submits = [_submit_of(record.id, work, salt) for work in prepared.works]
        tasks = [asyncio.ensure_future(self.client.submit(submit)) for submit in submits]
        try:
            return await asyncio.gather(*tasks)
        except BaseException as error:
            for task in tasks:
                task.cancel()
            for submit in submits:
                self.client.cancel(submit.request_id)
            if isinstance(error, ApiError) and error.status in (429, 503) and error.retry_after_s is None:
                error.retry_after_s = self._retry_after(error)
            raise

    def _retry_after(self, error: ApiError) -> float:
        """Seconds until a retry makes sense, an estimate: a full queue moves when the first running request ends, by
        the engine's ETA and its pace; a restarting engine takes as long as its first start did."""
        if error.code == "queue_full":
            soonest_ms = self.registry.soonest_end_ms()
            return retry_after(1.0 if soonest_ms is None else soonest_ms / 1e3)
        return retry_after(self.start_seconds if self.start_seconds is not None else GUESSED_START_S)

    def _refuse(self, record: Record, error: ApiError | None) -> None:
        outcome = "cancelled" if error is None else "refused" if error.status < 500 else "error"
        self.registry.close(record, outcome, None if error is None else error.message)
        self.metrics.observe_refusal(record.endpoint, "cancelled" if error is None else error.code)
        self._check_idle()

    def _forget(self, running: Running) -> None:
        self.running.pop(running.id, None)
        self._check_idle()

    def _check_idle(self) -> None:
        if not self.running and not self.registry.num_live:
            self._idle.set()


def retry_after(seconds: float) -> float:
    """Whole seconds for the header Retry-After, at least one."""
    return float(min(LONGEST_RETRY_S, max(1, math.ceil(seconds))))


def _submit_of(record_id: str, work: Work, salt: str | None) -> Submit:
    return Submit(_engine_id(record_id, work.choice), work.token_ids, work.params, salt)


def _engine_id(record_id: str, choice: int) -> str:
    return f"{record_id}-{choice}"
