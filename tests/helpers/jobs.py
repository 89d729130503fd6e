"""Jobs with a stand-in for the service: requests whose events are made by hand."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from longctx.events import Event
from longctx.server import job_run, job_thread
from longctx.server.errors import ApiError
from longctx.server.job_body import Order
from longctx.server.job_store import Job
from longctx.server.jobs import Jobs
from longctx.server.registry import Registry
from longctx.server.reply import Reply
from longctx.server.settings import ServerSettings
from longctx.server.ticket import Restarted
from tests.helpers.fake_running import FakeRunning, said

DIED = ApiError.from_code("engine_error", "the engine died")
WAIT_S = 20.0


class Work(FakeRunning):
    """A running request whose `items` may also be gates to wait at. It ends when it is cancelled, as real ones do."""

    async def events(self) -> AsyncIterator[tuple[int, Event | Restarted]]:
        for item in self.items:
            await asyncio.sleep(0)
            if isinstance(item, asyncio.Event):
                await item.wait()
            elif isinstance(item, ApiError):
                raise item
            else:
                yield item
        self.finished = True

    def cancel(self) -> None:
        self.cancelled = not self.finished


class Host:
    """What jobs see of the service. `script` answers each `begin` with the work or the error it gets."""

    def __init__(self, folder: Path | None, script: Callable[[int], Any], **settings: Any):
        self.settings = ServerSettings(jobs_dir=folder, **settings)
        self.registry = Registry()
        self.settled = asyncio.Event()
        self.settled.set()
        self.script = script
        self.begun: list[dict[str, Any]] = []
        self.works: list[Any] = []

    async def begin(self, endpoint: str, body: bytes, **given: Any) -> Any:
        self.begun.append({"endpoint": endpoint, "body": bytes(body), **given})
        work = self.script(len(self.begun) - 1)
        self.works.append(work)
        await asyncio.sleep(0)
        if isinstance(work, ApiError):
            raise work
        return work


@asynccontextmanager
async def running(
    folder: Path | None, script: Callable[[int], Any] = lambda _: answer(), **settings: Any
) -> AsyncIterator[tuple[Jobs, Host]]:
    host = Host(folder, script, **settings)
    jobs = Jobs(host)  # type: ignore[arg-type]
    await jobs.start()
    try:
        yield jobs, host
    finally:
        await jobs.stop()


def answer(text: str = "the key is 4711", *gates: asyncio.Event, endpoint: str = "completions", **options: Any) -> Work:
    """Work that says `text`, but only after all gates have opened."""
    return Work(endpoint, [*gates, *said(text)], **options)


def order(body: str = "{}", endpoint: str = "completions", ttl_s: float | None = None) -> Order:
    return Order(endpoint, body.encode(), hashlib.sha256(f"{endpoint}{body}{ttl_s}".encode()).digest(), ttl_s, None)


async def post(jobs: Jobs, tenant: str | None = None, key: str | None = None, **fields: Any) -> Job:
    return (await jobs.create(order(**fields), tenant, key))[0]


async def until(jobs: Jobs, job: Job, *states: str) -> Job:
    """The job once it is in one of the states."""
    async with asyncio.timeout(WAIT_S):
        while (now := await jobs.get(job.id, job.tenant or None)).state not in states:
            await asyncio.sleep(0.005)
    return now


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.005)


async def stream(jobs: Jobs, job: Job, place: str | None = None) -> list[Any]:
    """A whole stream as objects, the error it ended with as the last."""
    got: list[Any] = []
    async with asyncio.timeout(WAIT_S):
        try:
            async for piece in jobs.follow(job, place):
                got.append(read(piece.data))
        except ApiError as error:
            got.append(error.code)
    return got


def read(frame: bytes) -> Any:
    return json.loads(frame.decode().partition("data: ")[2])


def of_choice(chunks: Sequence[Any], choice: int) -> list[Any]:
    """The chunks of one choice; those of none are of choice -1."""
    return [chunk for chunk in chunks if (chunk["choices"][0]["index"] if chunk["choices"] else -1) == choice]


async def chunks_of(work: Work) -> list[Any]:
    """What a stream of it sends."""
    return [chunk async for chunk in Reply(work).chunks()]


def like(chunks: Sequence[Any], job: Job) -> list[Any]:
    """Chunks of a `FakeRunning` as the job's: under its name and time."""
    text = json.dumps(list(chunks)).replace(FakeRunning.id, job.id)
    return json.loads(text.replace(str(FakeRunning.created), str(int(job.created))))


def go(main: Awaitable[None]) -> None:
    asyncio.run(main)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_run, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(job_run, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(job_thread, "RETRY_S", 0.01)
