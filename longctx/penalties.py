"""Penalties and bias: what changes a row of logits before a token is chosen, and the token counts they need."""

# Legend: N ids that may be sampled, D distinct ids.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longctx.params import SamplingParams

_PIECE = 65_536
"""Prompt tokens taken at a time: converting a list holds the interpreter's lock, and others want to run meanwhile."""


@dataclass(frozen=True, eq=False)
class History:
    """Which tokens a request has had when a token is sampled; only what its penalties need, sparse and picklable.

    `seen` [D] int32: the distinct ids of prompt and output. `output_ids` [D] int32 and `output_counts` [D] int32: the
    distinct ids of the output and how often each occurs.
    """

    seen: np.ndarray
    output_ids: np.ndarray
    output_counts: np.ndarray


class TokenCounts:
    """Counts one request's tokens as they come. The prompt is read once; a new token costs the same at any length.

    A `History` given out never changes: its ids are slices of arrays that are only appended to.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]):
        self._repetition = params.repetition_penalty != 1.0
        self._output = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._prompt_ids = _distinct(prompt) if self._repetition else np.zeros(0, np.int32)
        self._seen = _Growing(self._prompt_ids)
        self._new: set[int] = set()
        self._places: dict[int, int] = {}
        self._ids = _Growing(np.zeros(0, np.int32))
        self._counts = _Growing(np.zeros(0, np.int32))

    def add(self, token_id: int) -> None:
        """Count a token of the output."""
        if self._repetition and token_id not in self._new:
            self._new.add(token_id)
            place = int(np.searchsorted(self._prompt_ids, token_id))
            if place == len(self._prompt_ids) or self._prompt_ids[place] != token_id:
                self._seen.append(token_id)
        if self._output:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids.values):
                self._ids.append(token_id)
                self._counts.append(0)
            self._counts.values[place] += 1

    def snapshot(self) -> History:
        """What has been counted so far."""
        return History(self._seen.values, self._ids.values, self._counts.values.copy())


def adjusted(x_N: np.ndarray, params: SamplingParams, history: History | None) -> np.ndarray:
    """A copy of the logits [N] fp32 with penalties and bias; `history` is needed if there are penalties.

    First the repetition penalty (Keskar et al. 2019, section 4.1, with the sign rule that later became common: positive
    logits are divided, others multiplied), then presence and frequency (OpenAI: minus presence for a token that occurs
    in the output, minus frequency for each time), then the bias. -inf stays -inf, and NaN NaN.
    """
    y_N = x_N.copy()
    if params.penalizes:
        assert history is not None, "penalties need the request's history"
        with np.errstate(over="ignore"):
            if params.repetition_penalty != 1.0:
                seen = history.seen[history.seen < len(y_N)]  # a prompt may hold ids that are never sampled
                x_D, penalty = y_N[seen], np.float32(params.repetition_penalty)
                y_N[seen] = np.where(x_D > 0, x_D / penalty, x_D * penalty)
            if len(history.output_ids):
                counted = history.output_counts.astype(np.float32) * np.float32(params.frequency_penalty)
                y_N[history.output_ids] -= np.float32(params.presence_penalty) + counted
    if params.logit_bias:
        ids, bias = params.bias_arrays
        y_N[ids] += bias
    return y_N


class _Growing:
    """An int32 array that is appended to; `values` is its filled part."""

    def __init__(self, start: np.ndarray):
        self._room = start
        self.values = start

    def append(self, value: int) -> None:
        n = len(self.values)
        if n == len(self._room):
            self._room = np.empty(max(16, 2 * n), np.int32)
            self._room[:n] = self.values
        self._room[n] = value
        self.values = self._room[: n + 1]


def _distinct(prompt: Sequence[int]) -> np.ndarray:
    """The distinct ids of a prompt [D] int32, ascending."""
    pieces = [np.unique(np.asarray(prompt[i : i + _PIECE], np.int32)) for i in range(0, len(prompt), _PIECE)]
    return np.unique(np.concatenate(pieces))
