"""What the server counts and times, under Prometheus names in the field's style."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from longctx.events import Event, FinishEvent, TokenEvent
from longctx.server.messages import EngineStats, ModelInfo

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Bounds for what may take as long as reading a million tokens."""

TOKEN_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
HTTP_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10, 60, 600, 3600)
PROMPT_TOKENS = tuple(2**power for power in range(8, 21))
ANSWER_TOKENS = tuple(2**power for power in range(15))

ENDPOINTS = ("completions", "chat", "responses")
OUTCOMES = ("stop", "length", "cancelled", "error")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"
TIERS = ("g1", "g2", "g3", "g4")
DECISIONS = ("load", "recompute")

MAX_OPEN = 4096
"""Requests whose last token's time is remembered: an event stream that broke off must not leave its entry forever."""


class Observed(Protocol):
    """What `Metrics` must know of the HTTP request an event belongs to: `arrived_s` is the `time.perf_counter()` of its
    arrival."""

    @property
    def endpoint(self) -> str: ...

    @property
    def arrived_s(self) -> float: ...


class HasRequestId(Protocol):
    """A sign about a request that is no event of the engine: it runs again from the start."""

    @property
    def request_id(self) -> str: ...


class Metrics:
    """Owns one registry; everything in it is named `longctx_...` but the figures of the process itself.

    A request here is one of the engine, so an HTTP request with `n` choices counts `n` times. What the engine counts
    comes in snapshots that start at zero with every new engine; the totals here never fall. Safe to call from threads.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.registry = registry = CollectorRegistry(auto_describe=False)
        self._clock = clock
        self._last_token_s: dict[str, float] = {}
        self._engine: int | None = None
        self._baseline: dict[str, int] = {}
        ProcessCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"longctx_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"longctx_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"longctx_{name}", text, labels, buckets=buckets, registry=registry)

        self._requests = counter("requests", "Requests that ended, by how: stop, length, ...", "endpoint", "outcome")
        self._refused = counter("refused", "Requests refused before any work, by the error's code", "endpoint", "code")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens of one answer", TOKEN_GAPS)
        self._queue = histogram("queue_time_seconds", "Waiting for the first step", SECONDS)
        self._total = histogram("request_duration_seconds", "From arrival in the engine to the end", SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens per request", PROMPT_TOKENS)
        self._answer = histogram("request_answer_tokens", "Generated tokens per request", ANSWER_TOKENS)

        self._prefill = counter("prefill_tokens", "Prompt tokens by where they came from", "source")
        self._decode = counter("decode_tokens", "Tokens generated")
        self._missed = counter("missed_tokens", "Prompt tokens that no tier had")
        self._steps = counter("steps", "Steps the engine has made")
        self._preemptions = counter("preemptions", "Requests put back because memory was short")
        self._cancels = counter("cancels", "Requests ended by their client or a deadline")
        self._decisions = counter(
            "fetch_decisions", "Cached blocks below the device: fetched or recomputed", "decision"
        )
        self._running = gauge("requests_running", "Requests in the present step")
        self._waiting = gauge("requests_waiting", "Requests in the queue")
        self._jobs = gauge("jobs", "Jobs that are kept, by where they stand", "state")
        self._kv = gauge(
            "kv_bytes", "KV memory: held by running requests, cached for later ones, free", "tier", "state"
        )

        self._up = gauge("engine_up", "1 while the engine takes requests")
        self._restarts = counter("engine_restarts", "Engine processes that ended and were started again")
        self._info = gauge("model_info", "The loaded model; the value is always 1", "model", "dtype", "kv_format")
        self._http = counter("http_requests", "HTTP requests by route and status", "method", "route", "status")
        self._http_s = histogram(
            "http_request_duration_seconds", "Until the last byte", HTTP_SECONDS, "method", "route"
        )
        for endpoint in ENDPOINTS:  # a series that appears at 1 hides its first increment from `rate`
            for outcome in OUTCOMES:
                self._requests.labels(endpoint, outcome)
        self._from_engine = {
            "prefill_tokens": self._prefill.labels("computed"),
            **{f"cached_tokens_{tier}": self._prefill.labels(tier) for tier in TIERS},
            **{f"decisions_{name}": self._decisions.labels(name) for name in DECISIONS},
            "decode_tokens": self._decode,
            "missed_tokens": self._missed,
            "steps": self._steps,
            "preemptions": self._preemptions,
            "cancels": self._cancels,
        }

    # -- requests ------------------------------------------------------------------------------------------------

    def observe_event(self, record: Observed, event: Event | HasRequestId) -> None:
        """Count what an event says; anything that is no `Event` means that the request runs again."""
        if isinstance(event, TokenEvent):
            self._observe_token(record, event)
        elif isinstance(event, FinishEvent):
            self._last_token_s.pop(event.request_id, None)
            self._requests.labels(record.endpoint, event.reason).inc()
            self._queue.observe(event.timings.queue_ms / 1e3)
            self._total.observe(event.timings.total_ms / 1e3)
            self._prompt.observe(event.usage.prompt_tokens)
            self._answer.observe(event.usage.completion_tokens)
        elif not isinstance(event, Event) and event.request_id in self._last_token_s:
            # The time to its first token is counted once; the gap across the restart is no token's latency.
            self._last_token_s[event.request_id] = math.nan

    def _observe_token(self, record: Observed, event: TokenEvent) -> None:
        now_s = self._clock()
        before_s = self._last_token_s.pop(event.request_id, None)
        if before_s is None and event.index == 0:
            self._ttft.observe(now_s - record.arrived_s)
        elif before_s is not None and not math.isnan(before_s):
            self._itl.observe(now_s - before_s)
        self._last_token_s[event.request_id] = now_s
        if len(self._last_token_s) > MAX_OPEN:
            del self._last_token_s[next(iter(self._last_token_s))]

    def observe_refusal(self, endpoint: str, code: str | None) -> None:
        """Count a request that was answered with an error before the engine took it."""
        self._refused.labels(endpoint, code or OTHER).inc()

    def observe_error(self, record: Observed, request_id: str) -> None:
        """Count a request whose events ended without a `FinishEvent`, as when the engine died."""
        self._last_token_s.pop(request_id, None)
        self._requests.labels(record.endpoint, "error").inc()

    # -- the engine ----------------------------------------------------------------------------------------------

    def observe_stats(self, stats: EngineStats) -> None:
        """Take a snapshot; the same one again changes nothing, and one of a new engine is added to the old totals."""
        fell = any(value < self._baseline.get(name, 0) for name, value in stats.counters.items())
        if stats.engine != self._engine or fell:
            self._engine, self._baseline = stats.engine, {}
        for name, total in self._from_engine.items():
            value = stats.counters.get(name, 0)
            total.inc(value - self._baseline.get(name, 0))
        self._baseline = dict(stats.counters)
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        for tier, sizes in stats.kv.items():
            held, cached = sizes.get("held", 0), sizes.get("cached", 0)
            for state, size in (("held", held), ("cached", cached), ("free", sizes.get("cap", 0) - held - cached)):
                self._kv.labels(tier, state).set(max(0, size))

    def observe_engine(self, *, ready: bool, restarts: int, info: ModelInfo | None = None) -> None:
        """Whether the engine takes requests, how often it was started again since the server began, and its model."""
        self._up.set(ready)
        if not ready:
            self._running.set(0)
            self._waiting.set(0)
        known = sum(sample.value for metric in self._restarts.collect() for sample in metric.samples[:1])
        self._restarts.inc(max(0, restarts - known))
        if info is not None:
            self._info.clear()
            self._info.labels(info.model, info.dtype, info.kv_format).set(1)

    def observe_jobs(self, counts: Mapping[str, int]) -> None:
        """How many jobs there are in each state."""
        for state, count in counts.items():
            self._jobs.labels(state).set(count)

    # -- HTTP ----------------------------------------------------------------------------------------------------

    def observe_http(self, method: str, route: str | None, status: int, seconds: float) -> None:
        """Count one HTTP request. `route` is the pattern (`/v1/requests/{id}`) or None where none matched: a path as
        the client wrote it would be a label for every id that anyone makes up."""
        known = method if method in METHODS else OTHER
        self._http.labels(known, route or OTHER, str(status)).inc()
        self._http_s.labels(known, route or OTHER).observe(seconds)

    def render(self) -> tuple[bytes, str]:
        """(body, content type) of GET /metrics."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
