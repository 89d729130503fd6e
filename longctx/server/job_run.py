"""One run of one job: begun when the engine has room, its stream kept while it grows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from longctx.events import Event
from longctx.server.errors import ApiError
from longctx.server.guard import new_request_id
from longctx.server.job_store import Chunk, Job, JobStore
from longctx.server.job_thread import JobThread
from longctx.server.json_pieces import json_pieces
from longctx.server.reply import Reply, Source
from longctx.server.sse import frame
from longctx.server.ticket import Restarted
from longctx.server.work import Prepared

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
PAUSE_PER_TRY = 4.0
"""A pause is at least so many times as long as the try before it: a long prompt is tokenized for every one."""

FLUSH_S = 0.05
"""Chunks that come closer together than this are written together."""


class Work(Source, Protocol):
    """What a job needs of a `Running`."""

    def cancel(self) -> None: ...


class Begin(Protocol):
    """`Service.begin`."""

    async def __call__(
        self,
        endpoint: str,
        body: bytes | bytearray,
        *,
        tenant: str | None,
        request_id: str,
        alias: str | None = None,
        is_job: bool = False,
    ) -> Work: ...


@dataclass(frozen=True)
class Answered:
    """The answer of a job."""

    result: bytes
    usage: dict[str, Any] | None


class JobRun:
    """One run of a job from its beginning. `notify` is called when its stream or its state has changed.

    An engine that is full or away only makes it take longer. `request_id` names its record in the registry. `progress`
    is the latest object of the stream that says how far it is: such objects are not kept.
    """

    def __init__(self, job: Job, begin: Begin, thread: JobThread, notify: Callable[[], None]):
        self.job = job
        self.request_id: str | None = None
        self.progress: bytes | None = None
        self._begin = begin
        self._thread = thread
        self._notify = notify
        self._pending: list[Chunk] = []
        self._complete = False
        self._grew = asyncio.Event()

    async def run(self) -> Answered | None:
        """The answer, its stream kept; None if the job was cancelled before it began.

        Raises the `ApiError` that its endpoint would have answered with. Cancelling the task cancels the work.
        """
        body = await self._thread.insist(JobStore.body, self.job)
        work = await self._when_there_is_room(body)
        try:
            started = await self._thread.insist(JobStore.start, self.job.id, time.time())
            if started is None:
                return None
            self.job = started
            self._notify()
            return await self._record(work)
        finally:
            # Nothing happens if it has come to its end.
            work.cancel()

    async def _when_there_is_room(self, body: bytes) -> Work:
        pause_s = FIRST_PAUSE_S
        while True:
            self.request_id, began_s = new_request_id(), time.monotonic()
            try:
                return await self._begin(
                    self.job.endpoint,
                    body,
                    tenant=self.job.tenant or None,
                    request_id=self.request_id,
                    alias=self.job.id,
                    is_job=True,
                )
            except ApiError as error:
                if error.status not in (429, 503):
                    raise
                log.debug("job %s waits: %s", self.job.id, error.message)
                wanted_s = min(LONGEST_PAUSE_S, max(pause_s, error.retry_after_s or 0.0))
                await asyncio.sleep(max(wanted_s, PAUSE_PER_TRY * (time.monotonic() - began_s)))
                pause_s *= 2

    async def _record(self, work: Work) -> Answered:
        reply = Reply(_AsJob(work, self.job))
        writing = asyncio.create_task(self._write())
        try:
            async with contextlib.aclosing(reply.chunks()) as chunks:
                async for chunk in chunks:
                    self._take(chunk)
            self._complete = True
            self._grew.set()
            await writing
        finally:
            writing.cancel()
        answer = reply.whole()
        # In slices and in a thread: prompt logprobs make answers of any size.
        return Answered(await asyncio.to_thread(lambda: b"".join(json_pieces(answer))), answer.get("usage"))

    def _take(self, chunk: dict[str, Any]) -> None:
        data = frame(chunk)
        if "prompt_progress" in chunk:
            self.progress = data
            self._notify()
            return
        choices = chunk.get("choices")
        self._pending.append(Chunk(choices[-1]["index"] if choices else -1, data))
        self._grew.set()

    async def _write(self) -> None:
        """Keep the chunks as they come, until they are complete."""
        written = 0
        while not (self._complete and not self._pending):
            await self._grew.wait()
            self._grew.clear()
            batch, self._pending = self._pending, []
            await self._thread.insist(JobStore.append, self.job, written, batch)
            written += len(batch)
            self.progress = None
            self._notify()
            if not self._complete:
                await asyncio.sleep(FLUSH_S)


class _AsJob:
    """A running request under its job's name and time, which are the same for every run."""

    def __init__(self, work: Work, job: Job):
        self._work = work
        self.id = job.id
        self.created = int(job.created)

    @property
    def prepared(self) -> Prepared:
        return self._work.prepared

    @property
    def seeds(self) -> Sequence[int]:
        return self._work.seeds

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._work.tokenizer

    def events(self) -> AsyncIterator[tuple[int, Event | Restarted]]:
        return self._work.events()

    def deliver(self, choice: int) -> None:
        self._work.deliver(choice)
