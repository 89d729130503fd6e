"""Reading a job's stream: from any place, while it grows, across its runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from longctx.server.errors import ApiError
from longctx.server.job_store import CANCELLED, FAILED, Chunk, Job, JobStore
from longctx.server.job_thread import JobThread


@dataclass(frozen=True)
class Piece:
    """An event of a stream as it is sent. `place` is where to go on after it; None for progress, which is not kept."""

    data: bytes
    place: str | None = None


class Signal:
    """Wakes everyone who waits for the next change of one job."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Set at the next change; take it before looking at what may change."""
        return self._changed

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Signals:
    """One signal per job that anyone waits for."""

    def __init__(self) -> None:
        self._signals: WeakValueDictionary[str, Signal] = WeakValueDictionary()

    def of(self, id: str) -> Signal:
        """Lives as long as it is held."""
        return self._signals.setdefault(id, Signal())

    def notify(self, id: str) -> None:
        signal = self._signals.get(id)
        if signal is not None:
            signal.notify()

    def notify_all(self) -> None:
        for signal in list(self._signals.values()):
            signal.notify()


class Position:
    """How far a reader is in a job's stream: how many chunks of each choice it has.

    Chunks of different choices come in another order when a job runs again, those of one choice do not.
    """

    def __init__(self, place: str | None = None):
        self._had: dict[int, int] = {}
        self._seen: Counter[int] = Counter()
        for part in (place or "").split(","):
            choice, _, count = part.partition(":")
            with contextlib.suppress(ValueError):
                self._had[int(choice)] = int(count)

    def take(self, chunk: Chunk) -> bool:
        """Pass the next chunk; whether the reader does not have it yet."""
        self._seen[chunk.choice] += 1
        if self._seen[chunk.choice] <= self._had.get(chunk.choice, 0):
            return False
        self._had[chunk.choice] = self._seen[chunk.choice]
        return True

    def begin_again(self) -> None:
        """The chunks come from the first one on again."""
        self._seen.clear()

    def __str__(self) -> str:
        return ",".join(f"{choice}:{count}" for choice, count in sorted(self._had.items()))


async def follow(
    job: Job,
    place: str | None,
    thread: JobThread,
    signal: Signal,
    progress: Callable[[], bytes | None],
    check_open: Callable[[], None],
) -> AsyncGenerator[Piece, None]:
    """A job's stream from its beginning, or from after `place` on, until the job has ended.

    What was sent of a run that broke off is not sent again by the next. `progress` has the latest object that says how
    far the job is. Raises the `ApiError` of a job that failed, and what `check_open` raises while it waits.
    """
    position, attempt, skip, shown = Position(place), job.attempts, 0, None
    while True:
        changed = signal.next()
        tail = await thread(JobStore.tail, job.id, attempt, skip)
        if tail is None:
            raise ApiError(404, "the job was deleted", code="job_not_found")
        job, chunks = tail
        if job.attempts != attempt:
            attempt, skip = job.attempts, 0
            position.begin_again()
        skip += len(chunks)
        for chunk in chunks:
            if position.take(chunk):
                yield Piece(chunk.data, str(position))
        if chunks:
            continue
        if not job.is_open:
            raise_failure(job)
            return
        check_open()
        latest = progress()
        if latest is not None and latest is not shown:
            shown = latest
            yield Piece(latest)
        else:
            await changed.wait()


def raise_failure(job: Job) -> None:
    """Raise the `ApiError` of a job that ended without a result."""
    if job.state == CANCELLED:
        raise ApiError(409, "the job was cancelled: it has no result", code="job_cancelled")
    if job.state == FAILED:
        assert job.error is not None
        raise ApiError(**job.error)
