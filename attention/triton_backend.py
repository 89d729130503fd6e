"""The GPU's backend: Triton kernels over paged blocks of every format, for prefill and decode."""

# Shape legend: T query tokens, R sequences, I items, H query heads, K kv heads, D head dim.
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from longctx.attention.kernels import tiles_triton as tiles
from longctx.attention.kernels.decode_triton import decode_kernel, merge_splits_kernel
from longctx.attention.kernels.prefill_triton import prefill_kernel
from longctx.attention.kernels.triton_launch import MERGE_ITEMS, OPTIONS, arch_of, layer_arguments, padded, products
from longctx.attention.kernels.triton_table import decode_tile, prefill_tile
from longctx.attention.span import AttnParams, DecodeBatch, Span
from longctx.attention.state import AttnState, empty_state
from longctx.quant.layout import LayerKV

LOG2_E = 1.4426950408889634
"""Scores are kept in units of log2: exp2 is the cheap exponential."""
KEPT_TABLES = 64
"""Block tables of prefilling sequences that are kept on the device, one per sequence and group of a step."""


@dataclass(frozen=True)
class _Plan:
    """What a batch's items are under one mask, on the device; made once per step, used by every layer of that mask."""

    batch: DecodeBatch
    tables: torch.Tensor
    positions: torch.Tensor
    item_row: torch.Tensor
    item_split: torch.Tensor
    row_items: torch.Tensor

    @staticmethod
    def of(batch: DecodeBatch, params: AttnParams, split: int, device: torch.device) -> _Plan:
        positions = batch.positions
        last, first, num_sinks = positions // split, np.zeros_like(positions), np.zeros_like(positions)
        if params.window is not None:
            first = np.maximum(positions - params.window + 1, 0) // split
            num_sinks = np.minimum(-(-params.sinks // split), first)
        if params.local_chunk is not None:
            first = np.maximum(first, positions // params.local_chunk * params.local_chunk // split)
        counts = last - first + 1 + num_sinks
        row_items = np.concatenate(([0], np.cumsum(counts)))
        item_row = np.repeat(np.arange(len(positions)), counts)
        nth = np.arange(row_items[-1]) - row_items[:-1][item_row]
        item_split = np.where(nth < num_sinks[item_row], nth, nth + (first - num_sinks)[item_row])
        parts = (batch.tables, positions, item_row, item_split, row_items)
        return _Plan(batch, *_on_device(parts, device))


class TritonBackend:
    """Computes every state with Triton kernels, keys and values decoded in registers.

    Products are computed in the queries' dtype with fp32 sums; with fp32 queries everything is fp32. Why a row's bits
    do not depend on its chunk or its mates: tiles and splits are cut at absolute positions, and constants depend on
    geometry and format alone. Keeps the plans of the last step, block tables on the device, and a scratch of partial
    states. For one thread at a time; on a CPU only in Triton's interpreter.
    """

    name = "triton"

    def __init__(self) -> None:
        self._plans: dict[tuple[int | None, int, int | None], _Plan] = {}
        self._tables: dict[int, tuple[np.ndarray, torch.Tensor]] = {}
        self._scratch: torch.Tensor | None = None

    def span_state(self, q_THD: torch.Tensor, start: int, span: Span, params: AttnParams) -> AttnState:
        layer = span.view.layer
        num_tokens, num_heads, _ = q_THD.shape
        if span.length == 0 or num_tokens == 0:
            return empty_state(num_tokens, num_heads, layer.v_dim, q_THD.device)
        q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
        out = torch.empty(num_tokens, num_heads, layer.v_dim, dtype=torch.float32, device=q_THD.device)
        lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q_THD.device)
        tensors, strides, constants = layer_arguments(layer)
        pad = padded(max(layer.k_dim, layer.v_dim))
        tile = prefill_tile(arch_of(q_THD.device), q_THD.dtype, layer.k_format.lossy or layer.v_format.lossy, pad)
        query_tiles = (start + num_tokens - 1) // tile.block_m - start // tile.block_m + 1
        prefill_kernel[(query_tiles, num_heads)](
            q_THD,
            *tensors,
            self._table(span.view.table, q_THD.device),
            out,
            lse,
            *q_THD.stride()[:2],
            *strides,
            start,
            num_tokens,
            span.start,
            span.start + span.length,
            *_mask(params),
            *_score(params),
            GROUP=num_heads // layer.k.shape[1],
            **constants,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            SOFTCAP=params.softcap is not None,
            **products(q_THD.dtype, pad),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **OPTIONS,
        )
        return AttnState(out, lse)

    def decode_state(self, q_RHD: torch.Tensor, layer: LayerKV, batch: DecodeBatch, params: AttnParams) -> AttnState:
        num_rows, num_heads, _ = q_RHD.shape
        num_kv_heads = layer.k.shape[1]
        group = num_heads // num_kv_heads
        q_RHD = q_RHD if q_RHD.stride(2) == 1 else q_RHD.contiguous()
        pad = padded(max(layer.k_dim, layer.v_dim))
        tile = decode_tile(arch_of(q_RHD.device), q_RHD.dtype, layer.k_format.lossy or layer.v_format.lossy, pad)
        plan = self._plan(batch, params, tile.split, q_RHD.device)
        num_items = len(plan.item_row)
        partial, tops, totals = self._partials(num_items * num_heads, layer.v_dim, q_RHD.device)
        out = torch.empty(num_rows, num_heads, layer.v_dim, dtype=torch.float32, device=q_RHD.device)
        lse = torch.empty(num_rows, num_heads, dtype=torch.float32, device=q_RHD.device)
        tensors, strides, constants = layer_arguments(layer)
        decode_kernel[(num_items, num_kv_heads)](
            q_RHD,
            *tensors,
            plan.tables,
            plan.positions,
            plan.item_row,
            plan.item_split,
            partial,
            tops,
            totals,
            plan.tables.shape[1],
            *q_RHD.stride()[:2],
            *strides,
            *_mask(params),
            *_score(params),
            GROUP=group,
            GROUP_PAD=padded(group),
            **constants,
            SPLIT=tile.split,
            BLOCK_N=tile.block_n,
            SOFTCAP=params.softcap is not None,
            **products(q_RHD.dtype, pad),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **OPTIONS,
        )
        merge_splits_kernel[(num_rows, num_heads)](
            partial, tops, totals, plan.row_items, out, lse,
            V_DIM=layer.v_dim, V_PAD=padded(layer.v_dim), BLOCK_I=MERGE_ITEMS, num_warps=4, **OPTIONS,
        )  # fmt: skip
        return AttnState(out, lse)

    def _plan(self, batch: DecodeBatch, params: AttnParams, split: int, device: torch.device) -> _Plan:
        key = (params.window, params.sinks, params.local_chunk)
        plan = self._plans.get(key)
        if plan is None or plan.batch is not batch:
            plan = self._plans[key] = _Plan.of(batch, params, split, device)
        return plan

    def _table(self, table: np.ndarray, device: torch.device) -> torch.Tensor:
        """A block table on the device. Tables of a step are never written to, so one that is the same is the same."""
        kept = self._tables.get(id(table))
        if kept is None or kept[0] is not table:
            if len(self._tables) >= KEPT_TABLES:
                self._tables.pop(next(iter(self._tables)))
            kept = self._tables[id(table)] = (table, _on_device((table,), device)[0])
        return kept[1]

    def _partials(self, num: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scratch for `num` partial states: out [num, dim], tops [num], totals [num]."""
        aligned = -(-num // 4) * 4
        size = aligned * (dim + 2)
        if self._scratch is None or self._scratch.numel() < size or self._scratch.device != device:
            self._scratch = torch.empty(size, dtype=torch.float32, device=device)
        out = self._scratch[: num * dim].view(num, dim)
        tops = self._scratch[aligned * dim :][:num]
        return out, tops, self._scratch[aligned * (dim + 1) :][:num]


def _on_device(arrays: tuple[np.ndarray, ...], device: torch.device) -> list[torch.Tensor]:
    """int64 arrays on the device by one copy, each from an aligned address on."""
    sizes = [-(-array.size // 2) * 2 for array in arrays]
    flat = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    starts = np.concatenate(([0], np.cumsum(sizes)))
    host = flat.numpy()
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.size] = array.ravel()
    moved = flat.to(device, non_blocking=True)
    return [moved[s : s + a.size].view(a.shape) for s, a in zip(starts, arrays, strict=False)]


def _mask(params: AttnParams) -> tuple[int, int, int]:
    """(window, sinks, local chunk) as the kernels take them; sinks stand only beside a window."""
    sinks = params.sinks if params.window is not None else 0
    return params.window or tiles.NO_WINDOW, sinks, params.local_chunk or tiles.NO_WINDOW


def _score(params: AttnParams) -> tuple[float, float]:
    """(what a product is multiplied by, what its tanh is multiplied by); without a soft-cap the first alone counts."""
    if params.softcap is None:
        return params.scale * LOG2_E, 0.0
    return params.scale / params.softcap, params.softcap * LOG2_E
