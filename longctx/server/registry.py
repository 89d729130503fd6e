"""What runs and what ran last: one record per HTTP request, kept current by its events."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longctx.events import Event, FinishEvent, ProgressEvent, Timings, TokenEvent, Usage
from longctx.server.logs import log_event

if TYPE_CHECKING:
    from longctx.server.ticket import Restarted

log = logging.getLogger(__name__)

STAGES = ("tokenizing", "queued", "prefill", "decode", "finished")
ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")
"""What responses put before a request's id; look-ups take both."""


@dataclass(frozen=True)
class Ended:
    """How one engine request ended. Its text and tokens are left out: records are kept, and show no one's text."""

    reason: str
    usage: Usage
    timings: Timings
    computed_tokens: int
    error: str | None


@dataclass
class ChoiceState:
    """One engine request of a record. Times in seconds of `time.perf_counter`."""

    total: int
    max_tokens: int | None = None
    stage: str = "queued"
    cached: int = 0
    processed: int = 0
    generated: int = 0
    eta_ms: float | None = None
    queue_position: int | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish: Ended | None = None

    def remaining_ms(self) -> float | None:
        """Estimate of what is left: the engine's ETA of the prefill, then the tokens still allowed at the pace of those
        generated so far (none yet: the prefill alone). None while nothing is known."""
        if self.stage in ("queued", "prefill"):
            return self.eta_ms
        if self.max_tokens is None or self.first_token_s is None or self.last_token_s is None or self.generated < 2:
            return None
        pace_s = (self.last_token_s - self.first_token_s) / (self.generated - 1)
        return 1e3 * pace_s * max(0, self.max_tokens - self.generated)

    def restart(self) -> None:
        """Forget what was generated: the engine runs this request again from its start."""
        self.stage, self.generated, self.eta_ms, self.queue_position = "queued", 0, None, None
        self.first_token_s = self.last_token_s = None


@dataclass(eq=False)
class Record:
    """One request as an operator or its owner sees it.

    Counts are sums over its choices; `arrived_s` and `end_s` are on the clock of `time.perf_counter`. `processed`
    counts prompt tokens done, cached ones included. `alias` is a name its client chose. `finish_reason` is the first
    choice's, or "cancelled" or "error" when that ended the request.
    """

    id: str
    tenant: str | None
    endpoint: str
    created: int
    alias: str | None = None
    arrived_s: float = field(default_factory=time.perf_counter)
    end_s: float | None = None
    choices: list[ChoiceState] = field(default_factory=list)
    choices_per_prompt: int = 1
    cancel_wanted: bool = False
    outcome: str | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.end_s is not None

    @property
    def stage(self) -> str:
        """The least advanced stage of the choices that still run."""
        if self.finished:
            return "finished"
        return min((c.stage for c in self.choices if c.finish is None), key=STAGES.index, default="tokenizing")

    @property
    def total(self) -> int:
        return sum(c.total for c in self.choices)

    @property
    def cached(self) -> int:
        return sum(c.cached for c in self.choices)

    @property
    def processed(self) -> int:
        return sum(c.processed for c in self.choices)

    @property
    def generated(self) -> int:
        return sum(c.generated for c in self.choices)

    @property
    def eta_ms(self) -> float | None:
        """Until the last of the prefills ends."""
        return max((c.eta_ms for c in self.choices if c.finish is None and c.eta_ms is not None), default=None)

    @property
    def queue_position(self) -> int | None:
        return min((c.queue_position for c in self.choices if c.queue_position is not None), default=None)

    @property
    def finish_reason(self) -> str | None:
        if self.outcome in ("cancelled", "error"):
            return self.outcome
        first = self.choices[0].finish if self.choices else None
        return None if first is None else first.reason

    @property
    def time_ms(self) -> float:
        """Since the request arrived, or what it took."""
        return 1e3 * ((self.end_s if self.end_s is not None else time.perf_counter()) - self.arrived_s)

    def usage(self) -> dict[str, Any] | None:
        """Tokens of all choices that ended, each prompt counted once, and by the tier that had them; None before."""
        ends = [c.finish for c in self.choices if c.finish is not None]
        if not ends:
            return None
        firsts = [c.finish.usage for c in self.choices[:: self.choices_per_prompt] if c.finish is not None]
        by_tier = {name: sum(u.by_tier.get(name, 0) for u in firsts) for name in ("g1", "g2", "g3", "g4")}
        return {
            "prompt_tokens": sum(u.prompt_tokens for u in firsts),
            "completion_tokens": sum(e.usage.completion_tokens for e in ends),
            "computed_tokens": sum(e.computed_tokens for e in ends),
            "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in firsts), "by_tier": by_tier},
        }

    def timings(self) -> dict[str, float] | None:
        """The first finished choice's; None before."""
        end = next((c.finish for c in self.choices if c.finish is not None), None)
        return None if end is None else {name: round(value, 3) for name, value in vars(end.timings).items()}

    def to_json(self) -> dict[str, Any]:
        """The body of `GET /v1/requests/{id}`."""
        return {
            "id": self.id,
            "object": "longctx.request",
            "endpoint": self.endpoint,
            "created": self.created,
            "client_request_id": self.alias,
            "stage": self.stage,
            "total": self.total,
            "cache": self.cached,
            "processed": self.processed,
            "time_ms": round(self.time_ms, 3),
            "eta_ms": None if self.eta_ms is None else round(self.eta_ms, 3),
            "queue_position": self.queue_position,
            "generated": self.generated,
            "num_choices": len(self.choices),
            "finish_reason": self.finish_reason,
            "usage": self.usage(),
            "timings": self.timings(),
            "error": self.error,
        }


class Registry:
    """Live records and the last `max_tracked` finished ones. Used from the event loop only."""

    def __init__(self, max_tracked: int = 256):
        self._max_tracked = max_tracked
        self._live: OrderedDict[str, Record] = OrderedDict()
        self._finished: OrderedDict[str, Record] = OrderedDict()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def open(self, id: str, endpoint: str, tenant: str | None, alias: str | None = None) -> Record:
        """Begin a record, its prompt not yet read. `id` is new."""
        assert id not in self._live, f"two requests with the id {id}"
        record = self._live[id] = Record(id, tenant, endpoint, int(time.time()), alias)
        return record

    def queued(self, record: Record, choices: Sequence[ChoiceState], choices_per_prompt: int = 1) -> None:
        """The prompt was read; its engine requests are on their way. Choice i belongs to prompt i // per prompt."""
        record.choices, record.choices_per_prompt = list(choices), choices_per_prompt

    def observe(self, record: Record, choice: int, event: Event | Restarted) -> None:
        """Bring `record` up to date with an event of its choice number `choice`."""
        state = record.choices[choice]
        if isinstance(event, ProgressEvent):
            state.stage, state.total, state.cached = event.stage, event.total, event.cached
            state.processed, state.eta_ms, state.queue_position = event.processed, event.eta_ms, event.queue_position
        elif isinstance(event, TokenEvent):
            state.last_token_s = time.perf_counter()
            if state.first_token_s is None:
                state.first_token_s = state.last_token_s
            state.stage, state.processed, state.eta_ms, state.queue_position = "decode", state.total, None, None
            state.generated += 1
        elif isinstance(event, FinishEvent):
            state.stage, state.eta_ms, state.queue_position = "finished", None, None
            state.finish = Ended(event.reason, event.usage, event.timings, event.computed_tokens, event.error)
        else:
            state.restart()

    def close(self, record: Record, outcome: str, error: str | None = None) -> None:
        """End a record: `outcome` is "finished", "cancelled", "refused" or "error". The first call counts."""
        if record.finished:
            return
        record.end_s, record.outcome, record.error = time.perf_counter(), outcome, error
        self._live.pop(record.id, None)
        self._finished[record.id] = record
        while len(self._finished) > self._max_tracked:
            self._finished.popitem(last=False)
        _log_end(record)

    def get(self, id: str, tenant: str | None) -> Record | None:
        """The tenant's record of this id, of a response's id, or the latest with this alias; None for others'."""
        for prefix in ID_PREFIXES:
            id = id.removeprefix(prefix)
        record = self._live.get(id) or self._finished.get(id)
        if record is not None and record.tenant == tenant:
            return record
        return next((r for r in self._newest_first() if r.alias == id and r.tenant == tenant), None)

    def list(self, tenant: str | None) -> Sequence[Record]:
        """The tenant's records, newest first, live ones before finished ones."""
        return [record for record in self._newest_first() if record.tenant == tenant]

    def live(self) -> Sequence[Record]:
        """Every tenant's live records, oldest first."""
        return tuple(self._live.values())

    def soonest_end_ms(self) -> float | None:
        """Estimate of the time until some running request ends and a place in the queue comes free; None if unknown."""
        running = [c for record in self._live.values() for c in record.choices if c.finish is None]
        left = [ms for choice in running if (ms := choice.remaining_ms()) is not None]
        return min(left, default=None)

    def _newest_first(self) -> Iterator[Record]:
        yield from reversed(self._live.values())
        yield from reversed(self._finished.values())


def _log_end(record: Record) -> None:
    """One line per request, with its figures and without its text."""
    usage, timings = record.usage() or {}, record.timings() or {}
    log_event(
        log,
        "a request ended",
        level=logging.WARNING if record.outcome == "error" else logging.INFO,
        request=record.id,
        endpoint=record.endpoint,
        outcome=record.outcome if record.outcome == "refused" else record.finish_reason,
        tenant=record.tenant,
        prompt_tokens=record.total or None,
        cached_tokens=record.cached if record.total else None,
        answer_tokens=usage.get("completion_tokens"),
        queue_ms=timings.get("queue_ms"),
        ttft_ms=timings.get("ttft_ms") if record.generated else None,
        time_ms=record.time_ms,
        error=record.error,
    )
