"""The reference backend: attention with torch's own operators, on any device; prefill on CPUs."""

# Shape legend: T query tokens, S keys, R sequences, H query heads, K kv heads, B block tokens, D head dim.
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from longctx.attention.attend import attend
from longctx.attention.kernels.sdpa import explicit, flash, flash_usable
from longctx.attention.masks import Q_BLOCK, MaskTables
from longctx.attention.span import (
    AttnParams,
    DecodeBatch,
    KVView,
    Span,
    prefill_spans,
    rows_that_see,
    tile_end,
    window_in,
)
from longctx.attention.state import AttnState, empty_state
from longctx.quant.layout import LayerKV
from longctx.quant.store import gather_tokens

ROW_ALIGN = 16
"""Query rows are padded to multiples of this position: matrix kernels treat a short remainder of rows differently."""


@dataclass(frozen=True)
class _Cut:
    """Query positions [q_start, q_end) against keys [lo, hi), under an additive mask [Q_BLOCK, hi - lo] or none."""

    q_start: int
    q_end: int
    lo: int
    hi: int
    mask: torch.Tensor | None


class TorchBackend:
    """Computes every state with torch operators in fp32; owns one tile's gather buffers and a few mask tables.

    Why a row's bits do not depend on its chunk: its keys are cut at absolute positions (`_cuts`), keys not yet
    written are zeros under the mask, and its place within the matrix kernels is its position modulo `ROW_ALIGN`.
    For one thread at a time.
    """

    name = "torch"

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._masks = MaskTables()

    def span_state(self, q_THD: torch.Tensor, start: int, span: Span, params: AttnParams) -> AttnState:
        num_tokens, num_heads, _ = q_THD.shape
        end = start + num_tokens
        first, last = rows_that_see(span, start, end, params)
        if first == last:
            return empty_state(num_tokens, num_heads, span.view.layer.v_dim, q_THD.device)

        cuts = list(self._cuts(first, last, span, params, q_THD.device))
        lo, hi = min(c.lo for c in cuts), max(c.hi for c in cuts)
        k_KSD, v_KSD = self._gather(span, lo, hi)
        q_HTD, q_first = _align_rows(q_THD[first - start : last - start].float(), first)
        product = flash if flash_usable(q_HTD, k_KSD, v_KSD, params) else explicit
        state = empty_state(num_tokens, num_heads, v_KSD.shape[2], q_THD.device)
        for cut in cuts:
            begin, stop = _aligned(cut.q_start, cut.q_end)
            mask = None if cut.mask is None else cut.mask[begin % Q_BLOCK :][: stop - begin]
            keys = slice(cut.lo - lo, cut.hi - lo)
            out, lse = product(q_HTD[:, begin - q_first : stop - q_first], k_KSD[:, keys], v_KSD[:, keys], mask, params)
            wanted = slice(cut.q_start - begin, cut.q_end - begin)
            if (cut.q_start, cut.q_end) == (start, end):
                return AttnState(out[wanted], lse[wanted])
            state.out[cut.q_start - start : cut.q_end - start] = out[wanted]
            state.lse[cut.q_start - start : cut.q_end - start] = lse[wanted]
        return state

    def decode_state(self, q_RHD: torch.Tensor, layer: LayerKV, batch: DecodeBatch, params: AttnParams) -> AttnState:
        """Row by row as a prefill of one token: bit-equal to the same token's row in any chunk."""
        states = []
        for row, position in enumerate(batch.positions.tolist()):
            spans = prefill_spans(KVView(layer, batch.tables[row]), position, 1, params)
            states.append(attend(q_RHD[row : row + 1], position, spans, params, self))
        return AttnState(torch.cat([s.out for s in states]), torch.cat([s.lse for s in states]))

    def _cuts(self, first: int, last: int, span: Span, params: AttnParams, device: torch.device) -> Iterator[_Cut]:
        """The products that make up one span: a function of absolute positions only.

        Query block [qb, qb + Q_BLOCK) is given the keys [lo, hi) of the tile: from the block border at or below the
        first key that its first row sees, to its own end. Neighbouring blocks with the same keys and no mask are one.
        """
        border, window = tile_end(span.start, params), window_in(span, params)
        span_end = span.start + span.length
        assert span_end <= border, f"span [{span.start}, {span_end}) crosses a tile border"
        pending: _Cut | None = None
        for qb in range(first // Q_BLOCK * Q_BLOCK, last, Q_BLOCK):
            q_start, q_end = max(qb, first), min(qb + Q_BLOCK, last)
            lo = span.start
            if window is not None:
                lo = max(lo, (qb - window + 1) // Q_BLOCK * Q_BLOCK)
            hi = min(border, qb + Q_BLOCK)
            # Causality hides keys at or past the span's end from all rows but those that stand beyond it.
            limit = span_end - lo if q_end > span_end else hi - lo
            mask = self._masks.get(qb - lo, hi - lo, window, limit, device)
            if pending and mask is None and pending.mask is None and (pending.lo, pending.hi) == (lo, hi):
                pending = _Cut(pending.q_start, q_end, lo, hi, None)
                continue
            if pending:
                yield pending
            pending = _Cut(q_start, q_end, lo, hi, mask)
        if pending:
            yield pending

    def _gather(self, span: Span, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at [lo, hi) of the span's sequence, zeros past the span's end, in the reused buffers."""
        layer = span.view.layer
        out = (self._buffer("k", layer.k, layer.k_dim, hi - lo), self._buffer("v", layer.v, layer.v_dim, hi - lo))
        length = max(0, min(hi, span.start + span.length) - lo)
        return gather_tokens(layer, span.view.table, lo, length, hi - lo, out)

    def _buffer(self, name: str, stored_NKBS: torch.Tensor, dim: int, num_tokens: int) -> torch.Tensor:
        num_kv_heads = stored_NKBS.shape[1]
        size = num_kv_heads * num_tokens * dim
        key = (name, stored_NKBS.device)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=torch.float32, device=stored_NKBS.device)
        return self._buffers[key][:size].view(num_kv_heads, num_tokens, dim)


def _aligned(begin: int, end: int) -> tuple[int, int]:
    return begin // ROW_ALIGN * ROW_ALIGN, -(-end // ROW_ALIGN) * ROW_ALIGN


def _align_rows(q_THD: torch.Tensor, first: int) -> tuple[torch.Tensor, int]:
    """Queries head-major [H, T', D], zero rows added so that they begin and end at aligned positions; the first one."""
    begin, end = _aligned(first, first + q_THD.shape[0])
    if q_THD.shape[0] < end - begin or q_THD.stride(-1) != 1:
        padded = q_THD.new_zeros(end - begin, *q_THD.shape[1:])
        padded[first - begin : first - begin + q_THD.shape[0]] = q_THD
        q_THD = padded
    return q_THD.transpose(0, 1), begin
