"""The text that two runs are compared on, read once by each: which positions are looked at, and how they are read."""

# Legend: T tokens of a step, n rows of logits, V vocabulary, H heads, D head dim.
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longctx import LLM
from longctx.evals.haystack import Haystack

DECODE_TOKENS = 1000
"""So many tokens at the end of a text are decoded one by one, so that errors can compound; half of a short text."""

READ_KEPT, PROBED = 512, 64
"""Positions of the part that is read whose logits are compared; positions of each part whose attention is."""

_CHARS_PER_TOKEN = 8

OnRow = Callable[[int, np.ndarray], None]
"""Hears (index among the kept positions, logits [V] fp32)."""
OnLayer = Callable[[int, np.ndarray, np.ndarray], None]
"""Hears (layer, indices [n] among the probed positions, attention output [n, H * D] fp32)."""


@dataclass(frozen=True)
class Text:
    """Token ids, of which the last `decode` are decoded; `kept` and `probed` are ascending positions."""

    ids: tuple[int, ...]
    decode: int
    kept: np.ndarray
    probed: np.ndarray

    @property
    def first_decoded(self) -> int:
        return len(self.ids) - self.decode


def make_text(llm: LLM, haystack: Haystack, length: int) -> Text:
    """The first `length` tokens of a haystack, special tokens included."""
    ids: list[int] = []
    chars = length * _CHARS_PER_TOKEN
    while len(ids) < length:
        ids = llm.encode(_text(haystack, chars))
        chars *= 2
    decode = min(DECODE_TOKENS, length // 2) // 4 * 4
    first = length - decode
    kept = [_spread(0, first, READ_KEPT), np.arange(first, length)]
    probed = [_spread(0, first, PROBED), _spread(first, length, PROBED)]
    return Text(tuple(ids[:length]), decode, np.concatenate(kept), np.concatenate(probed))


def _text(haystack: Haystack, chars: int) -> str:
    count = 1
    while len(text := haystack.joiner.join(haystack.take(count))) < chars:
        count *= 2
    return text[:chars]


def _spread(first: int, end: int, count: int) -> np.ndarray:
    """At most `count` positions of [first, end), evenly spaced, the last one among them."""
    count = min(count, end - first)
    return end - 1 - (np.arange(count, dtype=np.int64)[::-1] * (end - first)) // max(1, count)


def read_text(llm: LLM, text: Text, on_row: OnRow, on_layer: OnLayer) -> np.ndarray:
    """Run `text` through an engine; logprobs [n - 1] of every token but the first.

    Raises `EngineError` where the engine's logits are no numbers.
    """
    kept, probed = _places(text.kept, len(text.ids)), _places(text.probed, len(text.ids))
    limit = vocab_of(llm)

    def on_logits(start: int, rows_nV: np.ndarray) -> None:
        for i, index in enumerate(kept[start : start + len(rows_nV)].tolist()):
            if index >= 0:
                on_row(index, rows_nV[i, :limit])

    def on_attention(layer: int, positions_T: np.ndarray, out_THD: torch.Tensor) -> None:
        index_T = probed[positions_T]
        chosen = np.flatnonzero(index_T >= 0)
        if len(chosen):
            rows = out_THD[torch.as_tensor(chosen, device=out_THD.device)].float().cpu().numpy()
            on_layer(layer, index_T[chosen], rows.reshape(len(chosen), -1))

    with llm.probe(on_attention):
        score = llm.score(text.ids, decode=text.decode, on_logits=on_logits)
    return np.array(score.logprobs[1:], dtype=np.float64)


def vocab_of(llm: LLM) -> int:
    """How many ids may be sampled; rows of the head behind them stand for no token."""
    engine: Any = llm.engine
    limit: int = engine.loaded.vocab_limit
    return limit


def _places(positions: np.ndarray, length: int) -> np.ndarray:
    """The index among `positions` of every position below `length`, or -1."""
    places = np.full(length, -1, dtype=np.int64)
    places[positions] = np.arange(len(positions))
    return places
