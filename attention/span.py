"""Spans: which stored keys a query attends to, and under which mask."""

# Shape legend: N slots, K kv heads, B block tokens, D head dim.
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longctx.attention.reach import Reach
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

    @property
    def reach(self) -> Reach:
        return Reach(self.window, self.sinks, self.local_chunk)


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


def tile_end(position: int, params: AttnParams, tile: int = TILE_TOKENS) -> int:
    """The border after `position` that no span crosses: a multiple of `tile`, the sinks' end, the local chunk's end.

    So that on either side of the sinks' end every row of a span sees by one rule, and that no row sees two chunks.
    """
    end = (position // tile + 1) * tile
    if params.window is not None and position < params.sinks:
        end = min(end, params.sinks)
    if params.local_chunk is not None:
        end = min(end, (position // params.local_chunk + 1) * params.local_chunk)
    return end


def prefill_spans(
    view: KVView, start: int, num_tokens: int, params: AttnParams, tile: int = TILE_TOKENS
) -> Iterator[Span]:
    """The tiles that queries at positions [start, start + num_tokens) can see, in ascending order, the sinks first.

    Tiles are cut at `tile_end`; the first may begin before the window and the last may end past the queries' last
    position only up to that position: backends mask by position.
    """
    end = start + num_tokens
    sinks = 0 if params.window is None else params.sinks
    first = params.reach.first(start)
    if params.local_chunk is None:
        first = max(sinks, first // tile * tile)
    for begin, stop in ((0, min(sinks, end)), (first, end)):
        while begin < stop:
            until = min(tile_end(begin, params, tile), stop)
            yield Span(view, begin, until - begin)
            begin = until


def window_in(span: Span, params: AttnParams) -> int | None:
    """The window under which rows see the span's keys: none for sinks, which every later row sees."""
    return None if params.window is None or span.start < params.sinks else params.window


def rows_that_see(span: Span, start: int, end: int, params: AttnParams) -> tuple[int, int]:
    """The query positions [first, last) of [start, end) that see at least one key of the span."""
    if span.length == 0:
        return start, start
    window = window_in(span, params)
    first, last = min(max(start, span.start), end), end
    if window is not None:
        last = min(end, span.start + span.length + window - 1)
    elif params.local_chunk is not None:
        last = min(end, (span.start // params.local_chunk + 1) * params.local_chunk)
    return first, max(first, last)
