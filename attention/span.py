"""Spans: which stored keys a query attends to, and under which mask."""

# Shape legend: N slots, K kv heads, B block tokens, D head dim.
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longctx.quant.layout import LayerKV

TILE_TOKENS = 2048
"""KV tiles are cut at multiples of this absolute position, so that no row's arithmetic depends on its chunk."""


@dataclass(frozen=True)
class AttnParams:
    """Per-layer constants of attention: a query at position i sees key j <= i of its sequence if

    - `window` is None (full attention) or i - j < window (the query's own position counts), or j < `sinks`: the first
      positions, which stay visible beside a window;
    - and `local_chunk` is None or i and j lie between the same multiples of it. Not together with a window.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: int = 0
    local_chunk: int | None = None


@dataclass(frozen=True)
class KVView:
    """One sequence's stored keys and values of one layer.

    `table` [num_blocks] int64: position p lives in slot `table[p // B]`, row `p % B`; slot 0 is the null block.
    """

    layer: LayerKV
    table: np.ndarray


@dataclass(frozen=True)
class Span:
    """Positions [start, start + length) of a view. Causality and the window come from positions and `AttnParams`."""

    view: KVView
    start: int
    length: int


@dataclass(frozen=True)
class DecodeBatch:
    """One query per sequence, planned once per step and run per layer.

    `tables` [R, max_blocks] int64 (rows padded with 0), `positions` [R] int64: the query's own position, which is also
    the last key it sees.
    """

    tables: np.ndarray
    positions: np.ndarray


def prefill_spans(
    view: KVView, start: int, num_tokens: int, window: int | None, tile: int = TILE_TOKENS
) -> Iterator[Span]:
    """The tiles that queries at positions [start, start + num_tokens) can see, in ascending order.

    Tiles are cut at multiples of `tile`; the first may begin before the window and the last may end past the queries'
    last position only up to that position: backends mask by position.
    """
    first = 0 if window is None else max(0, start - window + 1)
    end = start + num_tokens
    for tile_start in range(first // tile * tile, end, tile):
        yield Span(view, tile_start, min(tile_start + tile, end) - tile_start)


def rows_that_see(span: Span, start: int, end: int, window: int | None) -> tuple[int, int]:
    """The query positions [first, last) of [start, end) that see at least one key of the span."""
    if span.length == 0:
        return start, start
    first = min(max(start, span.start), end)
    last = end if window is None else min(end, span.start + span.length + window - 1)
    return first, max(first, last)
