"""Stand-ins for engine, preparer and jobs, so that what lies between them is tested alone and without processes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longctx.events import FinishEvent, ProgressEvent, Timings, TokenEvent, Usage
from longctx.params import SamplingParams
from longctx.server.errors import ApiError
from longctx.server.messages import Loading, ModelInfo, Submit
from longctx.server.metrics import Metrics
from longctx.server.service import Service
from longctx.server.settings import ServerSettings
from longctx.server.ticket import Ticket
from longctx.server.work import Prepared, ReplyOptions, Work

INFO = ModelInfo(
    model="tiny",
    folder="/nowhere",
    vocab_size=320,
    max_positions=4096,
    longest_request=4096,
    dtype="float32",
    kv_format="fp32",
    weight_bytes=1000,
    workspace_bytes=1000,
    pool_bytes=1000,
    block_tokens=16,
    eos_token_ids=(2,),
    plan={},
)


def progress(
    id: str, stage: str = "prefill", processed: int = 0, eta_ms: float | None = None, **more: Any
) -> ProgressEvent:
    return ProgressEvent(id, stage, more.pop("total", 10), more.pop("cached", 0), processed, 1.0, eta_ms, **more)


def token(id: str, index: int) -> TokenEvent:
    return TokenEvent(id, 5, f"t{index}", index)


def finish(id: str, reason: str = "length", *, prompt: int = 10, tokens: int = 2, cached: int = 0) -> FinishEvent:
    usage = Usage(prompt, tokens, cached, {"g1": cached})
    error = "it broke" if reason == "error" else None
    return FinishEvent(id, reason, "secret text", (5,) * tokens, usage, Timings(1, 2, 3, 4, 5), prompt - cached, error)


@dataclass
class FakeClient:
    """An engine that does nothing by itself: a test feeds each ticket by hand, by its engine request's id."""

    state: str = "ready"
    info: ModelInfo | None = INFO
    loading: Loading | None = None
    last_failure: str | None = None
    restarts: int = 0
    stats: Any = None
    tickets: dict[str, Ticket] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    refuse: dict[int, ApiError] = field(default_factory=dict)
    delay_s: float = 0.0
    started: bool = False
    stopped: int = 0

    async def start(self) -> None:
        self.started = True

    async def stop(self) -> None:
        self.stopped += 1

    async def submit(self, submit: Submit) -> Ticket:
        number = len(self.tickets)
        ticket = self.tickets[submit.request_id] = Ticket(submit, self.cancel)
        await asyncio.sleep(self.delay_s)
        if number in self.refuse:
            raise self.refuse[number]
        ticket.seed = 100 + number
        return ticket

    def cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        return True


@dataclass
class FakePreparer:
    """Answers every body with `works` engine requests, after `gate` if there is one."""

    works: int = 1
    per_prompt: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    check_s: float = 0.0
    max_tokens: int | None = 2
    tokenizer: Any = None

    async def start(self, info: ModelInfo) -> None: ...

    async def stop(self) -> None: ...

    async def check(self, endpoint: str, body: bytes | bytearray) -> ReplyOptions:
        await asyncio.sleep(self.check_s)
        return ReplyOptions("tiny", **self.options)

    async def prepare(self, endpoint: str, body: bytes | bytearray) -> Prepared:
        if self.gate is not None:
            await self.gate.wait()
        if body == b"bad":
            raise ApiError(400, "bad body")
        params = SamplingParams(max_tokens=self.max_tokens)
        works = tuple(Work(np.arange(10, dtype=np.int32), params, choice) for choice in range(self.works))
        return Prepared(endpoint, works, ReplyOptions("tiny", n=self.per_prompt, **self.options))


class FakeJobs:
    """Nothing but how many there are said to be."""

    def __init__(self, counted: dict[str, int] | None = None) -> None:
        self.stopped = 0
        self._counted = counted or {}

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self.stopped += 1

    async def counts(self) -> dict[str, int]:
        return self._counted


def make_service(
    client: FakeClient | None = None, preparer: FakePreparer | None = None, **settings: Any
) -> tuple[Service, FakeClient, FakePreparer]:
    """A service of fakes, as if it had started."""
    client, preparer = client or FakeClient(), preparer or FakePreparer()
    service = Service(ServerSettings(**settings), client, preparer, Metrics())  # type: ignore[arg-type]
    service.jobs = FakeJobs()  # type: ignore[assignment]
    service.start_seconds = 3.0
    return service, client, preparer
