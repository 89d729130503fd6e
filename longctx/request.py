"""One request's life: its tokens, where it stands, and the text it has given so far."""

from __future__ import annotations

import operator
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from longctx.detokenize import IncrementalDetokenizer
from longctx.errors import RequestError
from longctx.events import FinishEvent, ProgressEvent, PromptLogprobs, Timings, TokenEvent, TokenLogprobs, Usage
from longctx.kv.table import BlockTable, KeyChain
from longctx.params import SamplingParams
from longctx.penalties import History, TokenCounts
from longctx.step import RowResult
from longctx.stop import StopMatcher


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def as_token_ids(values: Iterable[Any]) -> list[int]:
    """Whole numbers of any library's kind as a list; `RequestError` for what would have to be rounded or read."""
    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise RequestError(f"token ids must be a flat list of whole numbers: {error}") from error


def token_buffer(values: Iterable[Any]) -> array[int]:
    """Token ids as one growing block of 64-bit numbers: a million of them take milliseconds, and no garbage collection
    ever looks at them. A flat numpy array of whole numbers is copied as it is, anything else goes number by number.

    Raises `RequestError` as `as_token_ids` does, and for numbers beyond 64 bits.
    """
    ids = array("q")
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        ids.frombytes(np.ascontiguousarray(values, dtype=np.int64).data.cast("B"))
        return ids
    numbers = as_token_ids(values)
    try:
        ids.extend(numbers)
    except OverflowError:
        raise RequestError(f"token id {max(numbers, key=abs)} is outside every vocabulary") from None
    return ids


@dataclass
class ScoreSheet:
    """What a scoring request collects: the logprob of each next token and, if wanted, all logits [n, V].

    The last `decode` tokens are computed one by one, as those of an answer would be. With `on_logits(start, rows)` the
    logits [n, V] of positions from `start` on are handed over as they come instead of being kept; rows that a
    preemption made necessary again come again.
    """

    want_logits: bool = False
    decode: int = 0
    on_logits: Callable[[int, np.ndarray], None] | None = None
    logprobs: list[np.ndarray] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)

    @property
    def num_scored(self) -> int:
        return sum(map(len, self.logprobs))

    def take(self, result: RowResult) -> None:
        """Keep what a step computed."""
        assert result.scores is not None
        if result.logits is not None:
            if self.on_logits is not None:
                self.on_logits(self.num_scored, result.logits)
            else:
                self.logits.append(result.logits)
        self.logprobs.append(result.scores.logprobs)

    def rewind(self, num_scored: int) -> None:
        """Forget what will be computed again: every position from `num_scored` on."""
        assert num_scored <= self.num_scored
        for rows in (self.logprobs, self.logits):
            rows[:] = [np.concatenate(rows)[:num_scored]] if num_scored and rows else []


class PromptSheet:
    """What a request collects that wants its prompt's logprobs beside its answer, in arrays that never grow."""

    def __init__(self, num_prompt_tokens: int):
        self._num_prompt_tokens = num_prompt_tokens
        self._rows: PromptLogprobs | None = None
        self.num_scored = 0

    def take(self, result: RowResult) -> None:
        """Keep what a step computed."""
        assert result.scores is not None
        scores, n = result.scores, self._num_prompt_tokens
        if self._rows is None:
            shape = (n, scores.top_ids.shape[1])
            self._rows = PromptLogprobs(np.empty(n, np.float32), np.empty(shape, np.int32), np.empty(shape, np.float32))
        rows = slice(self.num_scored, self.num_scored + len(scores.logprobs))
        self._rows.logprobs[rows] = scores.logprobs
        self._rows.top_ids[rows] = scores.top_ids
        self._rows.top_logprobs[rows] = scores.top_logprobs
        self.num_scored = rows.stop

    def rewind(self, num_scored: int) -> None:
        """Forget what will be computed again: every position from `num_scored` on."""
        assert num_scored <= self.num_scored
        self.num_scored = num_scored

    def logprobs(self) -> PromptLogprobs | None:
        """The whole prompt's, or None if it was not read to the end."""
        if self._rows is None or self.num_scored < self._num_prompt_tokens:
            return None
        # What the last position predicts is no token of the prompt.
        return PromptLogprobs(self._rows.logprobs[:-1], self._rows.top_ids[:-1], self._rows.top_logprobs[:-1])


@dataclass(eq=False)
class Request:
    """A prompt on its way to an answer. Owned by the scheduler; `cancelled` may be set from any thread.

    `token_ids` grows from the prompt by the generated tokens. Tokens [0, num_computed) have keys and values in `table`;
    while the request waits it has no table and `num_computed` is 0. `max_total_tokens` is prompt plus `max_tokens`;
    `order` is its place among all requests ever queued: who comes first is not who was built first.
    """

    id: str
    token_ids: array[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    regime: int
    chain: KeyChain
    eos_token_ids: frozenset[int]
    detokenizer: IncrementalDetokenizer | None = None
    cacheable: bool = True
    score: ScoreSheet | None = None
    num_prompt_tokens: int = field(init=False)
    status: Status = Status.WAITING
    table: BlockTable | None = None
    num_computed: int = 0
    cached_tokens: int | None = None
    computed_tokens: int = 0
    preemptions: int = 0
    cancelled: bool = False
    order: int = 0
    texts: list[str] = field(default_factory=list)
    arrival_s: float = field(default_factory=time.perf_counter)
    start_s: float | None = None
    first_token_s: float | None = None
    reported: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids) - self._num_forced
        self._stop = StopMatcher(self.params.stop)
        self._counts = TokenCounts(self.params, self.token_ids) if self.params.penalizes else None
        assert self.score is None or self.params.prompt_logprobs is None, "a request is scored or answered"
        self.sheet: ScoreSheet | PromptSheet | None = self.score
        if self.params.prompt_logprobs is not None:
            self.sheet = PromptSheet(self.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Positions that can ever need a slot: the last token is never fed back, unless it is scored."""
        if self.score is not None:
            return self.num_tokens
        return max(self.num_prompt_tokens, self.max_total_tokens - 1)

    @property
    def _num_forced(self) -> int:
        """Tokens that are given like a prompt's and computed like an answer's."""
        return 0 if self.score is None else self.score.decode

    @property
    def in_prefill(self) -> bool:
        if self._num_forced:
            return self.num_computed < self.num_prompt_tokens
        return self.num_tokens - self.num_computed > 1 or self.num_computed < self.num_prompt_tokens

    @property
    def num_ahead(self) -> int:
        """Tokens that one step may compute together."""
        if self._num_forced:
            return max(1, self.num_prompt_tokens - self.num_computed)
        return self.num_tokens - self.num_computed

    @property
    def scoring(self) -> bool:
        """Whether tokens of the prompt still need their logprobs, and so their logits."""
        wanted = self.num_tokens if self.score is not None else self.num_prompt_tokens
        return self.sheet is not None and self.sheet.num_scored < wanted

    def history(self) -> History | None:
        """The tokens so far as penalties need them; None if there are no penalties."""
        return None if self._counts is None else self._counts.snapshot()

    def append(
        self, token_id: int, now_s: float, logprobs: TokenLogprobs | None = None
    ) -> tuple[TokenEvent, str | None]:
        """Take a sampled token; answers its event and the reason to finish, if there is one."""
        self.token_ids.append(token_id)
        if self._counts is not None:
            self._counts.add(token_id)
        if self.first_token_s is None:
            self.first_token_s = now_s
        reason = None
        if token_id in self.eos_token_ids and not self.params.ignore_eos:
            reason = "stop"
        text = self.detokenizer.add(token_id) if self.detokenizer is not None else ""
        text, hit = self._stop.add(text)
        if hit:
            reason = "stop"
        if reason is None and self.num_tokens >= self.max_total_tokens:
            reason = "length"
        if reason is not None and not hit:
            text += self._flush()
        self.texts.append(text)
        return TokenEvent(self.id, token_id, text, self.num_output_tokens - 1, logprobs), reason

    def _flush(self) -> str:
        tail = self.detokenizer.finish() if self.detokenizer is not None else ""
        released, hit = self._stop.add(tail)
        return released if hit else released + self._stop.finish()

    def progress(self, now_s: float, processed: int, eta_s: float | None, position: int | None = None) -> ProgressEvent:
        """Progress at `processed` prompt tokens; the number reported never falls, even after a preemption."""
        self.reported = max(self.reported, min(processed, self.num_prompt_tokens))
        stage = "queued" if self.status is Status.WAITING else "prefill" if self.in_prefill else "decode"
        return ProgressEvent(
            self.id,
            stage,
            self.num_prompt_tokens,
            self.cached_tokens or 0,
            self.reported,
            (now_s - self.arrival_s) * 1e3,
            None if eta_s is None else eta_s * 1e3,
            position,
        )

    def finish(self, reason: str, now_s: float, error: str | None = None) -> FinishEvent:
        """Close the request and say how it went."""
        self.status = Status.FINISHED
        if reason in ("cancelled", "error"):
            # What was held back as a possible stop string, or as half a character, is output after all.
            self.texts.append(self._flush())
        start_s = self.start_s if self.start_s is not None else now_s
        first_s = self.first_token_s if self.first_token_s is not None else now_s
        cached = self.cached_tokens or 0
        prefill_s = first_s - start_s
        decode_s = now_s - first_s
        decoded = max(0, self.num_output_tokens - 1)
        return FinishEvent(
            self.id,
            reason,
            "".join(self.texts),
            tuple(self.token_ids[self.num_prompt_tokens :]),
            Usage(self.num_prompt_tokens, self.num_output_tokens, cached, {"g1": cached}),
            Timings(
                queue_ms=(start_s - self.arrival_s) * 1e3,
                ttft_ms=(first_s - self.arrival_s) * 1e3,
                prefill_tokens_per_s=(self.num_prompt_tokens - cached) / prefill_s if prefill_s > 0 else 0.0,
                decode_tokens_per_s=decoded / decode_s if decode_s > 0 else 0.0,
                total_ms=(now_s - self.arrival_s) * 1e3,
            ),
            self.computed_tokens,
            error,
            self.sheet.logprobs() if isinstance(self.sheet, PromptSheet) else None,
        )
