"""What one step computes: picklable, no tensors, the only thing that travels from the scheduler to a runner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longctx.params import SamplingParams


@dataclass(frozen=True)
class CopyRows:
    """Copy the first `rows` tokens of slot `src` into slot `dst` of a group, for all its layers (copy on write)."""

    group: int
    src: int
    dst: int
    rows: int


@dataclass(frozen=True)
class StepRow:
    """Tokens [start, start + n) of one request.

    `token_ids` [n] int64; `tables` one int64 array per layer group, covering every block up to start + n. Rows at
    positions below `num_prompt_tokens` are prefill, the others decode; a row may hold both after a preemption.
    `sample` asks for a token after the last position; `score` asks for the logprob of each next token in `targets` [n].
    """

    request_id: str
    start: int
    token_ids: np.ndarray
    tables: tuple[np.ndarray, ...]
    num_prompt_tokens: int
    regime: int
    params: SamplingParams
    seed: int
    sample: bool
    targets: np.ndarray | None = None
    want_logits: bool = False

    @property
    def n(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class StepSpec:
    """One step: `copies` run first and in order, then the rows' tokens are computed together."""

    rows: tuple[StepRow, ...]
    copies: tuple[CopyRows, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.n for row in self.rows)


@dataclass(frozen=True)
class RowResult:
    """What a step gave one row: a token if it sampled; logprobs [n] and, if asked for, logits [n, vocab] if it scored.

    `error` says why nothing could be sampled or scored (logits that are not numbers); it ends only this request.
    """

    request_id: str
    token_id: int | None = None
    logprobs: np.ndarray | None = None
    logits: np.ndarray | None = None
    error: str | None = None
