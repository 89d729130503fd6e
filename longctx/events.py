"""What a request tells its owner while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Usage:
    """Token counts of a finished request; `cached_tokens` were found at match time, never computed for this request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    by_tier: dict[str, int] = field(default_factory=dict)
    """Cached tokens by where they were found: g1 (device), g2 (host), g3 (disk), g4 (remote)."""


@dataclass(frozen=True)
class Timings:
    """Measured times of a finished request in milliseconds; rates in tokens per second (0 if nothing was computed)."""

    queue_ms: float
    ttft_ms: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    total_ms: float


@dataclass(frozen=True)
class ProgressEvent:
    """Where a request stands. `processed` counts prompt tokens done, cached ones included; it never decreases."""

    request_id: str
    stage: str  # queued | prefill | decode
    total: int
    cached: int
    processed: int
    time_ms: float
    eta_ms: float | None
    queue_position: int | None = None


@dataclass(frozen=True)
class TokenEvent:
    """One generated token. `text` is the newly complete text, possibly empty while a character is incomplete."""

    request_id: str
    token_id: int
    text: str
    index: int


@dataclass(frozen=True)
class FinishEvent:
    """The last event of a request. `reason`: stop | length | scored | cancelled | error.

    `computed_tokens` counts every position computed for this request, those computed again after a preemption included.
    """

    request_id: str
    reason: str
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    timings: Timings
    computed_tokens: int
    error: str | None = None


Event = ProgressEvent | TokenEvent | FinishEvent
