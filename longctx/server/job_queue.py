"""Which job runs when, and what becomes of a run that broke off."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from longctx.server.errors import ApiError
from longctx.server.job_run import Answered, Begin, JobRun
from longctx.server.job_store import CANCELLED, DONE, FAILED, RUNNING, WAITING, Job, JobStore
from longctx.server.job_stream import Signals
from longctx.server.job_thread import JobThread

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
"""Runs that a job gets when engine or server end in the middle of them: it may be their cause."""

ATTEMPTS_TOGETHER = 2
"""After so many a job runs with no other beside it: one that kills engines shall take no innocent along."""


class JobQueue:
    """Runs at most `slots` jobs at a time. Tenants take turns; a tenant's jobs begin in their order.

    A job whose engine or server ended runs again from its start, `MAX_ATTEMPTS` times at most. Used from one event
    loop, after `recover`.
    """

    def __init__(self, slots: int, begin: Begin, thread: JobThread, signals: Signals):
        self._slots = slots
        self._begin = begin
        self._thread = thread
        self._signals = signals
        self._waiting: dict[str, Job] = {}
        self._running: dict[str, tuple[JobRun, asyncio.Task[None]]] = {}
        self._turns: dict[str, int] = {}
        """Per tenant the number of the last turn it had."""
        self._wake = asyncio.Event()
        self._stopping = False

    async def recover(self) -> None:
        """Take over what the store has, from before a restart too."""
        for job in await self._thread(JobStore.in_state, RUNNING):
            if job.attempts >= MAX_ATTEMPTS:
                await self._thread(JobStore.finish, job.id, FAILED, time.time(), error=stored(_gave_up(job)))
            else:
                await self._thread(JobStore.requeue, job.id)
        waiting = await self._thread(JobStore.in_state, WAITING)
        self._waiting = {job.id: job for job in waiting}
        if waiting:
            log.info("%d jobs were waiting or running when the server ended: they run now", len(waiting))

    async def run(self) -> None:
        """Begin jobs as there is room, for ever."""
        while True:
            self._wake.clear()
            while (job := self._next()) is not None:
                del self._waiting[job.id]
                self._turns[job.tenant] = max(self._turns.values(), default=0) + 1
                run = JobRun(job, self._begin, self._thread, partial(self._signals.notify, job.id))
                self._running[job.id] = run, asyncio.create_task(self._work(run))
            await self._wake.wait()

    async def stop(self) -> None:
        """End what runs; it counts as waiting again, and the broken run is not held against it."""
        self._stopping = True
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for job in await self._thread(JobStore.in_state, RUNNING):
            await self._thread(JobStore.requeue, job.id, forgive=True)

    def add(self, job: Job) -> None:
        self._waiting[job.id] = job
        self._wake.set()

    def drop(self, id: str) -> None:
        """Neither begin nor go on with a job."""
        self._waiting.pop(id, None)
        if id in self._running:
            self._running[id][1].cancel()

    def run_of(self, id: str) -> JobRun | None:
        """The present run of a job."""
        run = self._running.get(id)
        return None if run is None else run[0]

    def place(self, job: Job) -> int | None:
        """How many of the same tenant's jobs are to begin before this one; None for one that has begun."""
        if job.id not in self._waiting:
            return None
        return sum(other.tenant == job.tenant and other.seq < job.seq for other in self._waiting.values())

    def _next(self) -> Job | None:
        """The job to begin now: the oldest of the tenant that has fewest running and waits longest for its turn."""
        running = [run.job for run, _ in self._running.values()]
        if len(running) >= self._slots or any(map(_runs_alone, running)):
            return None
        busy = Counter(job.tenant for job in running)

        def rank(job: Job) -> tuple[int, int, int]:
            return busy[job.tenant], self._turns.get(job.tenant, 0), job.seq

        job = min(self._waiting.values(), key=rank, default=None)
        return None if job is None or (running and _runs_alone(job)) else job

    async def _work(self, run: JobRun) -> None:
        """One run of a job, and what comes of it."""
        id = run.job.id
        try:
            outcome = await _outcome(run)
            # A stop cancels the engine's work; that is no decision about the job.
            if outcome is not None and not self._stopping:
                await self._settle(run.job, outcome)
        finally:
            del self._running[id]
            self._wake.set()
            self._signals.notify(id)

    async def _settle(self, job: Job, outcome: Answered | ApiError) -> None:
        now = time.time()
        if isinstance(outcome, Answered):
            await self._thread.insist(JobStore.finish, job.id, DONE, now, result=outcome.result, usage=outcome.usage)
        elif outcome.code == "cancelled":
            await self._thread.insist(JobStore.finish, job.id, CANCELLED, now)
        elif outcome.status < 500 or outcome.code == "deadline_exceeded":
            await self._thread.insist(JobStore.finish, job.id, FAILED, now, error=stored(outcome))
        else:
            await self._run_again(job, outcome)

    async def _run_again(self, job: Job, error: ApiError) -> None:
        """The engine or the server failed, not the job; after too many times it is given up."""
        # A try that failed before it began counts too.
        begun = await self._thread.insist(JobStore.start, job.id, time.time())
        job = begun or job
        if job.attempts >= MAX_ATTEMPTS:
            failure = stored(_gave_up(job, error))
            await self._thread.insist(JobStore.finish, job.id, FAILED, time.time(), error=failure)
            return
        log.warning("job %s runs again after try %d: %s", job.id, job.attempts, error.message)
        waiting = await self._thread.insist(JobStore.requeue, job.id)
        if waiting is not None:
            self.add(waiting)


def stored(error: ApiError) -> dict[str, Any]:
    """An error as the store keeps it: `ApiError(**stored(error))` is the same."""
    fields: Sequence[str] = ("status", "message", "type", "code", "param")
    return {name: getattr(error, name) for name in fields}


async def _outcome(run: JobRun) -> Answered | ApiError | None:
    try:
        return await run.run()
    except ApiError as error:
        return error
    except Exception as error:
        log.exception("a job's run failed")
        return ApiError(500, f"the server failed: {type(error).__name__}", type="server_error", code="server_error")


def _runs_alone(job: Job) -> bool:
    return job.attempts >= ATTEMPTS_TOGETHER


def _gave_up(job: Job, cause: ApiError | None = None) -> ApiError:
    why = "the server ended" if cause is None else cause.message
    message = f"given up after {job.attempts} runs, none of which came to its end; the last: {why}"
    return ApiError(500, message, type="server_error", code="job_given_up")
