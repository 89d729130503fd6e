"""A server behind the real page whose engine is played by the test: it moves when told, so nothing depends on speed."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from longctx.events import Event, FinishEvent, ProgressEvent, Timings, TokenEvent, Usage
from longctx.server import page
from longctx.server.messages import EngineStats
from longctx.server.metrics import Metrics
from longctx.server.registry import ChoiceState, Record, Registry
from longctx.server.service import Service
from tests.helpers.server_fakes import FakeJobs

STATS = EngineStats(
    running=1,
    waiting=1,
    kv={
        "g1": {"held": 800_000_000, "cached": 500_000_000, "cap": 2_000_000_000},
        "g2": {"held": 0, "cached": 3_000_000_000, "cap": 8_000_000_000},
    },
    counters={
        "prefill_tokens": 40_000,
        "cached_tokens_g1": 90_000,
        "cached_tokens_g2": 30_000,
        "decode_tokens": 900,
        "preemptions": 2,
    },
    engine=1,
)
PLAN: dict[str, Any] = {
    "verdict": "fits",
    "remedy": None,
    "tokens": 8448,
    "concurrency": 1,
    "kv_bytes": 208_000_000,
    "scale_bytes": 0,
    "pool_bytes": 2_000_000_000,
    "needed_bytes": 230_000_000,
    "peak_bytes": 3_700_000_000,
    "requests_that_fit": 8,
    "num_chunks": 5,
    "seconds": {"low": 9.1, "high": 12.4},
}
REFUSED: dict[str, Any] = {
    **PLAN,
    "verdict": "refused",
    "tokens": 131_328,
    "needed_bytes": 3_300_000_000,
    "requests_that_fit": 0,
    "remedy": "131,328 tokens exceed the model's 32,768 positions: ask for at most 32,768, or extend it",
}


@dataclass
class Tried:
    """One streamed request of the page: its body, what it is sent next, and whether its client left."""

    body: dict[str, Any]
    path: str
    to_send: queue.SimpleQueue[dict[str, Any] | None] = field(default_factory=queue.SimpleQueue)
    left: threading.Event = field(default_factory=threading.Event)


class PageServer:
    """Serves the page at `url`; the test sets what it shows. May be stopped, and started again on the same port."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"engine": "ready", "draining": False, "loading": None, "last_failure": None}
        self.longest_request = 32_768
        self.chat_template = True
        self.key: str | None = None
        self.plan: dict[str, Any] = PLAN
        self.plan_asked: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.tried: queue.SimpleQueue[Tried] = queue.SimpleQueue()
        self.metrics = Metrics()
        self.registry = Registry()
        self.client = SimpleNamespace(state="ready", stats=STATS, restarts=0, info=None)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._count = 0
        self.start()

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        config = uvicorn.Config(self._app(), log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()
        self._socket.close()

    def start_again(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", self.port))
        self.start()

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, endpoint: str = "chat", total: int = 32_000) -> Record:
        """A request that waits."""
        self._count += 1
        record = self.registry.open(f"{self._count:08x}f00d", endpoint, None)
        self.registry.queued(record, [ChoiceState(total, max_tokens=100)])
        self.tell(record, ProgressEvent(record.id, "queued", total, 0, 0, 10.0, 90_000.0, self._count))
        return record

    def tell(self, record: Record, event: Event) -> None:
        self.registry.observe(record, 0, event)

    def read(self, record: Record, processed: int, cached: int = 0, eta_s: float | None = 30.0) -> None:
        """Its prefill is so far."""
        eta_ms = None if eta_s is None else 1e3 * eta_s
        self.tell(record, ProgressEvent(record.id, "prefill", record.total, cached, processed, 1.0, eta_ms))

    def write(self, record: Record, index: int) -> None:
        self.tell(record, TokenEvent(record.id, 5, "x", index))

    def finish(self, record: Record, reason: str = "stop", cached: int = 0, answer: int = 40) -> None:
        by_tier = {"g1": cached // 2, "g2": cached - cached // 2}
        usage, computed = Usage(record.total, answer, cached, by_tier), record.total - cached
        timings = Timings(12.0, 4321.0, 1234.5, 15.25, 9000.0)
        self.tell(record, FinishEvent(record.id, reason, "", (), usage, timings, computed))
        self.registry.close(record, "cancelled" if reason == "cancelled" else "finished")

    # -- the app -------------------------------------------------------------------------------------------------

    def _app(self) -> FastAPI:
        app = FastAPI()
        jobs = FakeJobs({"queued": 1, "running": 2, "completed": 5, "failed": 0})
        service = SimpleNamespace(metrics=self.metrics, client=self.client, jobs=jobs)
        app.include_router(page.router(cast(Service, service)))
        app.middleware("http")(self._check_key)
        app.get("/ready")(self._ready)
        app.get("/v1/models")(self._models)
        app.get("/v1/requests")(self._requests)
        app.delete("/v1/requests/{id}")(self._cancel)
        app.post("/tokenize")(self._tokenize)
        app.post("/v1/plan")(self._plan)
        app.post("/v1/chat/completions")(self._generate)
        app.post("/v1/completions")(self._generate)
        return app

    async def _check_key(self, request: Request, call_next: Any) -> Any:
        given = request.headers.get("authorization")
        if self.key is None or request.url.path in ("/", "/ready") or given == f"Bearer {self.key}":
            return await call_next(request)
        code = "missing_api_key" if given is None else "invalid_api_key"
        return JSONResponse({"error": {"message": "an API key is required", "code": code}}, 401)

    async def _ready(self) -> JSONResponse:
        ready = self.state["engine"] == "ready"
        self.client.state = self.state["engine"]
        body = {"status": "ready" if ready else "not ready", "version": "0.1.0", "restarts": 0, **self.state}
        return JSONResponse({**body, "running_requests": self.registry.num_live}, 200 if ready else 503)

    async def _models(self) -> dict[str, Any]:
        model = {"id": "some-model", "longest_request": self.longest_request, "kv_format": "fp32"}
        return {"object": "list", "data": [model]}

    async def _requests(self) -> dict[str, Any]:
        return {"object": "list", "data": [record.to_json() for record in self.registry.list(None)]}

    async def _cancel(self, id: str) -> dict[str, Any]:
        record = self.registry.get(id, None)
        assert record is not None
        self.cancelled.append(id)
        self.finish(record, "cancelled", answer=0)
        return record.to_json()

    async def _tokenize(self) -> JSONResponse:
        if self.chat_template:
            return JSONResponse({"tokens": [1], "count": 1})
        error = {"message": "this model has no chat template", "code": "no_chat_template"}
        return JSONResponse({"error": error}, 400)

    async def _plan(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.plan_asked.append(body)
        if isinstance(body.get("tokens"), str) or {"tokens", "max_tokens"} <= set(body):
            return JSONResponse({"error": {"message": "tokens 'many' is not understood"}}, 400)
        return JSONResponse(self.plan)

    async def _generate(self, request: Request) -> StreamingResponse:
        tried = Tried(await request.json(), request.url.path)
        self.tried.put(tried)
        return StreamingResponse(self._stream(tried), media_type="text/event-stream")

    async def _stream(self, tried: Tried) -> AsyncIterator[str]:
        try:
            yield ": ping\n\n"
            while True:
                try:
                    item = tried.to_send.get_nowait()
                except queue.Empty:
                    await asyncio.sleep(0.01)
                    continue
                yield f"data: {json.dumps(item) if item is not None else '[DONE]'}\n\n"
                if item is None:
                    return
        except asyncio.CancelledError:
            tried.left.set()
            raise


def progress(stage: str, processed: int, total: int, cache: int = 0, eta_ms: float | None = None) -> dict[str, Any]:
    """A stream's chunk that says how far the prompt is."""
    body = {"total": total, "cache": cache, "processed": processed, "time_ms": 10.0, "eta_ms": eta_ms, "stage": stage}
    return {"choices": [], "prompt_progress": {**body, "queue_position": None}}


def delta(text: str, *, chat: bool = True, finish_reason: str | None = None) -> dict[str, Any]:
    """A stream's chunk with text."""
    choice = {"index": 0, "finish_reason": finish_reason}
    return {"choices": [{**choice, "delta": {"content": text}} if chat else {**choice, "text": text}]}


def usage(prompt: int, cached: int, answer: int) -> dict[str, Any]:
    """A stream's last chunk."""
    details = {"cached_tokens": cached, "by_tier": {"g1": cached, "g2": 0, "g3": 0, "g4": 0}}
    return {
        "choices": [],
        "usage": {"prompt_tokens": prompt, "completion_tokens": answer, "prompt_tokens_details": details},
        "timings": {"queue_ms": 1.0, "ttft_ms": 1234.0, "prefill_tokens_per_s": 800.0, "decode_tokens_per_s": 21.0},
    }
