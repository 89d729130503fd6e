"""Jobs: long work that outlives its client's connection and its server's process."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from longctx.errors import LongctxError
from longctx.server.errors import ApiError
from longctx.server.job_body import Order
from longctx.server.job_queue import JobQueue
from longctx.server.job_store import CANCELLED, WAITING, Job, JobLimitError, JobStore
from longctx.server.job_stream import Piece, Signals, follow, raise_failure
from longctx.server.job_thread import JobThread

if TYPE_CHECKING:
    from longctx.server.service import Service

P = ParamSpec("P")
T = TypeVar("T")

EXPIRE_EVERY_S = 30.0
COUNT_WAIT_S = 0.2


class Jobs:
    """Owns the jobs: takes them, runs some at a time beside everything else, keeps what they answer.

    What was running when server or engine ended runs again from its start, with the same seeds. A job of another tenant
    does not exist. Without a folder (`ServerSettings.jobs_dir`) every call is refused. Used from one event loop.
    """

    def __init__(self, service: Service):
        self._service = service
        self._settings = service.settings
        self._thread = JobThread()
        self._signals = Signals()
        self._queue = JobQueue(service.settings.max_running_jobs, service.begin, self._thread, self._signals)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._counts: dict[str, int] = {}
        self._opened = False
        self._suspended = False

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the folder; what waits there runs once the service has settled. Raises `LongctxError`."""
        if (folder := self._settings.jobs_dir) is None:
            return
        await self._thread.open(folder)
        self._opened = True
        try:
            await self._queue.recover()
        except ApiError as error:
            raise LongctxError(f"{folder}: {error.message}") from error
        self._loops = [asyncio.create_task(self._run()), asyncio.create_task(self._expire())]

    async def suspend(self) -> None:
        """End what runs, to be run again at the next start; jobs can be looked at until `stop`. May be called again."""
        if self._suspended:
            return
        self._suspended = True
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._opened:
            # A disk that fails now was logged; the next start finds these jobs broken off.
            with contextlib.suppress(ApiError):
                await self._queue.stop()
        self._signals.notify_all()

    async def stop(self) -> None:
        """`suspend`, and give the folder free. May be called again."""
        await self.suspend()
        if self._opened:
            self._opened = False
            await self._thread.close()

    # -- what clients ask ----------------------------------------------------------------------------------------

    async def create(self, order: Order, tenant: str | None, key: str | None) -> tuple[Job, bool]:
        """Take a checked order; the job, and whether it is new: the same key and order again is the same job."""
        now = time.time()
        await self._ask(JobStore.expire, now)
        self._check_running()
        ttl_s = self._time_to_live(order)
        id = f"job_{secrets.token_hex(12)}"
        job = Job(id, tenant or "", order.endpoint, WAITING, order.digest, now, ttl_s, key)
        kept = await self._whole(self._add(job, order.body))
        return _same(kept, order), kept.id == id

    async def get(self, id: str, tenant: str | None) -> Job:
        """A job of this tenant; `ApiError` 404 for every other id."""
        job = await self._ask(JobStore.get, id)
        if job is None or job.tenant != (tenant or "") or _is_over(job):
            raise ApiError(404, "no such job: it is not one of yours, expired, or deleted", code="job_not_found")
        return job

    async def list(
        self, tenant: str | None, limit: int, after: str | None = None, state: str | None = None
    ) -> Sequence[Job]:
        """The tenant's jobs, newest first, from the one after `after` on."""
        await self._ask(JobStore.expire, time.time())
        if after is not None:
            await self.get(after, tenant)
        return await self._ask(JobStore.list, tenant or "", limit, after, state)

    async def result(self, job: Job) -> bytes:
        """The answer's JSON, as its endpoint would have sent it. Raises the `ApiError` of a job that has none."""
        if job.is_open:
            raise ApiError(409, f"the job is {job.state}: its result is not there yet", code="job_not_finished")
        raise_failure(job)
        result = await self._ask(JobStore.result, job)
        if result is None:
            raise ApiError(404, "the job was deleted", code="job_not_found")
        return result

    def follow(self, job: Job, place: str | None = None) -> AsyncGenerator[Piece, None]:
        """A job's stream from its beginning, or from after `place` on, until it ends. Raises the job's `ApiError`."""

        def progress() -> bytes | None:
            run = self._queue.run_of(job.id)
            return None if run is None else run.progress

        return follow(job, place, self._thread, self._signals.of(job.id), progress, self._check_running)

    async def cancel(self, job: Job) -> Job | None:
        """End an open job between two layers, which returns it as it is then; forget one that has ended: None."""
        self._check_open()
        return await self._whole(self._cancel(job))

    def progress(self, job: Job) -> dict[str, Any] | None:
        """How far a job is, from its first token of reading on: its request's `GET /v1/requests/{id}`."""
        run = self._queue.run_of(job.id)
        if run is None or run.request_id is None:
            return None
        record = self._service.registry.get(run.request_id, job.tenant or None)
        return None if record is None else record.to_json()

    def place(self, job: Job) -> int | None:
        """How many of the same tenant's jobs are to begin before this one; None for one that has begun."""
        return self._queue.place(job)

    async def counts(self) -> dict[str, int]:
        """How many jobs of all tenants are in each state; what was last known while the disk keeps one waiting."""
        if self._opened:
            with contextlib.suppress(ApiError, TimeoutError):
                async with asyncio.timeout(COUNT_WAIT_S):
                    self._counts = await self._thread(JobStore.counts)
        return self._counts

    # -- inside --------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._settings.jobs_dir is None:
            message = "this server keeps no jobs: it has no folder for them (--jobs-dir)"
            raise ApiError(503, message, type="server_error", code="jobs_unavailable")

    def _check_running(self) -> None:
        if self._suspended:
            raise ApiError.from_code("draining", "the server is shutting down; jobs go on at its next start", 10.0)

    async def _ask(self, method: Callable[Concatenate[JobStore, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_open()
        return await self._thread(method, *args, **kwargs)

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Do all of it even if who waits goes away: what is on the disk must be in the queue."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _add(self, job: Job, body: bytes) -> Job:
        most = self._settings.max_jobs
        share = max(1, most // max(1, len(self._settings.api_keys)))
        try:
            kept = await self._thread(JobStore.add, job, body, max_jobs=most, max_of_tenant=share)
        except JobLimitError:
            message = f"at most {share:,} jobs of yours and {most:,} in all are kept: delete those that you have read"
            raise ApiError(429, message, type="rate_limit_error", code="too_many_jobs", retry_after_s=60.0) from None
        if kept.id == job.id:
            self._queue.add(kept)
        return kept

    def _time_to_live(self, order: Order) -> float:
        longest_s = self._settings.job_ttl_s
        if order.ttl_s is not None and order.ttl_s > longest_s:
            message = f"ttl_s can be at most {longest_s:g}, what this server keeps answers for (--job-ttl)"
            raise ApiError(400, message, code="invalid_value", param="ttl_s")
        return longest_s if order.ttl_s is None else order.ttl_s

    async def _cancel(self, job: Job) -> Job | None:
        if not job.is_open:
            await self._thread(JobStore.remove, job.id)
            return None
        ended = await self._thread(JobStore.finish, job.id, CANCELLED, time.time())
        self._queue.drop(job.id)
        self._signals.notify(job.id)
        # It may have come to its own end meanwhile.
        return ended or await self._thread(JobStore.get, job.id)

    async def _run(self) -> None:
        await self._service.settled.wait()
        await self._queue.run()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            with contextlib.suppress(ApiError):
                await self._thread(JobStore.expire, time.time())


def _is_over(job: Job) -> bool:
    return job.expires is not None and job.expires <= time.time()


def _same(job: Job, order: Order) -> Job:
    """The job that an idempotency key names, if it is what is asked for now."""
    if job.digest != order.digest:
        raise ApiError(
            422,
            "this idempotency key belongs to a job that asked for something else: use another key, or the same body",
            code="idempotency_key_reused",
            param="idempotency_key",
        )
    return job
