"""What a request tells its owner while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np


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
class TokenLogprobs:
    """A token's logprob under the model, before penalties, bias and temperature, and the best tokens in its place.

    `top_ids` are in falling order of `top_logprobs`, equals in rising order of the ids. A logprob may be -inf.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class PromptLogprobs(Sequence[TokenLogprobs | None]):
    """Logprobs of a whole prompt: a sequence as long as the prompt whose first entry is None.

    Kept as arrays of n - 1 rows, `logprobs` [n - 1] and `top_ids`, `top_logprobs` [n - 1, k], because a million
    entries as objects would take gigabytes.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def __len__(self) -> int:
        return len(self.logprobs) + 1

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenLogprobs | None, ...]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | tuple[TokenLogprobs | None, ...] | None:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        row = range(len(self))[index] - 1
        if row < 0:
            return None
        return TokenLogprobs(
            float(self.logprobs[row]), tuple(self.top_ids[row].tolist()), tuple(self.top_logprobs[row].tolist())
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PromptLogprobs) and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("logprobs", "top_ids", "top_logprobs")
        )


@dataclass(frozen=True)
class TokenEvent:
    """One generated token. `text` is the newly complete text, possibly empty while a character is incomplete.

    `logprobs` is there if the request asked for them.
    """

    request_id: str
    token_id: int
    text: str
    index: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class FinishEvent:
    """The last event of a request. `reason`: stop | length | scored | cancelled | error.

    `computed_tokens` counts every position computed for this request, those computed again after a preemption included.
    `prompt_logprobs` is there if the request asked for them and its prompt was read to the end.
    """

    request_id: str
    reason: str
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    timings: Timings
    computed_tokens: int
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None


Event = ProgressEvent | TokenEvent | FinishEvent
