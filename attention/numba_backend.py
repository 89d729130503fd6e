"""The CPU's decode backend: numba kernels over paged fp32 blocks; everything else is left to torch."""

# Shape legend: R sequences, H query heads, K kv heads, D head dim.
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from longctx.attention.kernels.decode_numba import ARGS, SPLIT_TOKENS, decode_kernel, item_floats
from longctx.attention.kernels.omp import run_on_threads
from longctx.attention.span import AttnParams, DecodeBatch, Span
from longctx.attention.state import AttnState
from longctx.attention.torch_backend import TorchBackend
from longctx.quant.layout import LayerKV


@dataclass(frozen=True)
class _Plan:
    """What a batch's items are under one window; made once per step, used by every layer of that window."""

    batch: DecodeBatch
    tables: np.ndarray
    item_row: np.ndarray
    item_split: np.ndarray
    row_items: np.ndarray

    @staticmethod
    def of(batch: DecodeBatch, window: int | None) -> _Plan:
        positions = batch.positions
        assert positions.dtype == batch.tables.dtype == np.int64 and positions.flags.c_contiguous
        first = np.maximum(positions - window + 1, 0) // SPLIT_TOKENS if window else np.zeros_like(positions)
        counts = positions // SPLIT_TOKENS - first + 1
        row_items = np.concatenate(([0], np.cumsum(counts)))
        item_row = np.repeat(np.arange(len(positions)), counts)
        item_split = np.arange(row_items[-1]) - (row_items[:-1] - first)[item_row]
        return _Plan(batch, np.ascontiguousarray(batch.tables), item_row, item_split, row_items)


class NumbaBackend:
    """Decodes with compiled kernels where K and V are stored in fp32 with one head dim; prefills with torch.

    Other pools (bf16, fp16, Dk unlike Dv) decode by the torch path, exact but slow. Keeps the plans of the last step
    and a scratch buffer of partial states. For one thread at a time; uses `torch.get_num_threads()` threads.
    """

    name = "numba"

    def __init__(self, torch_backend: TorchBackend | None = None) -> None:
        self._torch = torch_backend or TorchBackend()
        self._plans: dict[int | None, _Plan] = {}
        self._scratch = np.empty(0, np.float32)

    def span_state(self, q_THD: torch.Tensor, start: int, span: Span, params: AttnParams) -> AttnState:
        return self._torch.span_state(q_THD, start, span, params)

    def decode_state(self, q_RHD: torch.Tensor, layer: LayerKV, batch: DecodeBatch, params: AttnParams) -> AttnState:
        if not _kernel_reads(layer) or params.sinks or params.local_chunk is not None:
            return self._torch.decode_state(q_RHD, layer, batch, params)
        q_RHD = q_RHD.float().contiguous()
        num_rows, num_heads, dim = q_RHD.shape
        num_kv_heads = layer.k.shape[1]
        group = num_heads // num_kv_heads
        plan = self._plan(batch, params.window)
        num_items = len(plan.item_row)
        progress = np.zeros(1 + num_rows * num_kv_heads, np.int64)
        partial = self._partial(num_items * num_kv_heads * item_floats(dim, group))
        out_RHD, lse_RH = torch.empty_like(q_RHD), torch.empty(num_rows, num_heads)
        args = np.array(
            (
                *(num_items, num_kv_heads, layer.block_tokens, plan.tables.shape[1], params.window or 0),
                *(*layer.k.stride()[:2], *layer.v.stride()[:2]),
                *(x.data_ptr() for x in (q_RHD, layer.k, layer.v, out_RHD, lse_RH)),
                *(x.ctypes.data for x in (plan.tables, batch.positions, plan.item_row, plan.item_split)),
                *(x.ctypes.data for x in (plan.row_items, progress, partial)),
                *(params.scale, params.softcap or 0.0),
            ),
            ARGS,
        )
        run_on_threads(decode_kernel(dim, group), args.ctypes.data, torch.get_num_threads())
        return AttnState(out_RHD, lse_RH)

    def _plan(self, batch: DecodeBatch, window: int | None) -> _Plan:
        plan = self._plans.get(window)
        if plan is None or plan.batch is not batch:
            plan = self._plans[window] = _Plan.of(batch, window)
        return plan

    def _partial(self, num_floats: int) -> np.ndarray:
        if self._scratch.size < num_floats:
            self._scratch = np.empty(num_floats, np.float32)
        return self._scratch


def _kernel_reads(layer: LayerKV) -> bool:
    """fp32 keys and values of one head dim, each head's rows of a block contiguous."""
    return (
        layer.k.dtype == layer.v.dtype == torch.float32
        and layer.k.device.type == "cpu"
        and layer.k.shape[3] == layer.v.shape[3]
        and all(x.stride(2) == x.shape[3] and x.stride(3) == 1 for x in (layer.k, layer.v))
    )
