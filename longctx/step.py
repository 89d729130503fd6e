"""What one step computes: picklable, no tensors, the only thing that travels from the scheduler to a runner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longctx.events import TokenLogprobs
from longctx.params import SamplingParams
from longctx.penalties import History


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
    `sample` asks for a token after the last position, with `history` for its penalties and its logprobs if
    `params.logprobs` says so. `targets` [n] asks for the logprob of each next token, and for the best
    `params.prompt_logprobs` in its place; a row may do both.
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
    history: History | None = None

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


@dataclass(frozen=True, eq=False)
class LogprobRows:
    """Logprobs [n] fp32 of the tokens that followed; `top_ids`, `top_logprobs` [n, k] of the best in their places."""

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(frozen=True)
class RowResult:
    """What a step gave one row: a token if it sampled, with its logprobs if asked for; `scores` of [n] tokens and, if
    asked for, logits [n, vocab] if it scored.

    `error` says why nothing could be sampled or scored (logits that are not numbers); it ends only this request.
    """

    request_id: str
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    scores: LogprobRows | None = None
    logits: np.ndarray | None = None
    error: str | None = None
