"""The CPU's decode backend: numba kernels over paged blocks of any format; chunks of prompts are left to torch."""

# Shape legend: R sequences, H query heads, K kv heads, D head dim.
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from longctx.attention.kernels.decode_numba import ARGS, SPLIT_TOKENS, Shape, decode_kernel
from longctx.attention.kernels.kinds_numba import can_read
from longctx.attention.kernels.omp import run_on_threads
from longctx.attention.span import AttnParams, DecodeBatch, Span
from longctx.attention.state import AttnState
from longctx.attention.torch_backend import TorchBackend
from longctx.quant.layout import LayerKV

_Rule = tuple[int | None, int, int | None]
"""Window, sinks and local chunk: what decides which keys a position sees."""


@dataclass(frozen=True)
class _Plan:
    """What a batch's items are under one rule; made once per step, used by every layer of that rule.

    Item i covers positions [item_begin, item_end) of row `item_row`; row r has the items row_items[r] to [r + 1].
    """

    batch: DecodeBatch
    tables: np.ndarray
    item_row: np.ndarray
    item_begin: np.ndarray
    item_end: np.ndarray
    row_items: np.ndarray

    @staticmethod
    def of(batch: DecodeBatch, rule: _Rule) -> _Plan:
        window, sinks, local_chunk = rule
        last = batch.positions
        assert last.dtype == batch.tables.dtype == np.int64
        first = np.zeros_like(last) if window is None else np.maximum(last - window + 1, 0)
        # The sinks that no window covers: none where there is no window.
        sinks_end = np.minimum(first, sinks)
        if local_chunk is not None:
            first = np.maximum(first, last // local_chunk * local_chunk)
        of_sinks = -(-sinks_end // SPLIT_TOKENS)
        counts = of_sinks + last // SPLIT_TOKENS - first // SPLIT_TOKENS + 1
        row_items = np.concatenate(([0], np.cumsum(counts)))
        item_row = np.repeat(np.arange(len(last)), counts)
        place = np.arange(row_items[-1]) - row_items[item_row]
        is_sink = place < of_sinks[item_row]
        split = np.where(is_sink, place, place + (first // SPLIT_TOKENS - of_sinks)[item_row])
        begin = np.where(is_sink, 0, first[item_row])
        end = np.where(is_sink, sinks_end[item_row], last[item_row] + 1)
        item_begin = np.maximum(split * SPLIT_TOKENS, begin)
        item_end = np.minimum((split + 1) * SPLIT_TOKENS, end)
        return _Plan(batch, np.ascontiguousarray(batch.tables), item_row, item_begin, item_end, row_items)


class NumbaBackend:
    """Decodes with compiled kernels, whatever the formats and head dims of K and V; prefills with torch.

    Pools that its kernels cannot read (not on a CPU, rows apart) decode by the torch path, exact but slow. Keeps the
    plans of the last step and a scratch buffer. For one thread at a time; uses `torch.get_num_threads()` threads.
    """

    name = "numba"

    def __init__(self, torch_backend: TorchBackend | None = None) -> None:
        self._torch = torch_backend or TorchBackend()
        self._plans: dict[_Rule, _Plan] = {}
        self._scratch = np.empty(0, np.float32)

    def span_state(self, q_THD: torch.Tensor, start: int, span: Span, params: AttnParams) -> AttnState:
        return self._torch.span_state(q_THD, start, span, params)

    def decode_state(self, q_RHD: torch.Tensor, layer: LayerKV, batch: DecodeBatch, params: AttnParams) -> AttnState:
        if not _kernel_reads(layer):
            return self._torch.decode_state(q_RHD, layer, batch, params)
        q_RHD = q_RHD.float().contiguous()
        num_rows, num_heads, k_dim = q_RHD.shape
        num_kv_heads = layer.k.shape[1]
        shape = Shape(k_dim, layer.v_dim, num_heads // num_kv_heads, layer.k_format.name, layer.v_format.name)
        plan = self._plan(batch, params)
        num_items, num_threads = len(plan.item_row), torch.get_num_threads()
        progress = np.zeros(2 + num_rows * num_kv_heads, np.int64)
        partial_floats = num_items * num_kv_heads * shape.item_floats
        floats = self._floats(partial_floats + num_threads * shape.scratch_floats)
        out_RHD, lse_RH = torch.empty(num_rows, num_heads, layer.v_dim), torch.empty(num_rows, num_heads)
        stored = (layer.k, layer.v, layer.k_scale, layer.v_scale)
        args = np.array(
            (
                *(num_items, num_kv_heads, layer.block_tokens, plan.tables.shape[1]),
                *(0 if x is None else x.stride(dim) * x.element_size() for dim in (0, 1) for x in stored),
                *(0 if x is None else x.data_ptr() for x in (*stored, q_RHD, out_RHD, lse_RH)),
                *(x.ctypes.data for x in (plan.tables, plan.item_row, plan.item_begin, plan.item_end)),
                *(plan.row_items.ctypes.data, progress.ctypes.data),
                *(floats.ctypes.data, floats.ctypes.data + 4 * partial_floats),
                *(params.scale, params.softcap or 0.0),
            ),
            ARGS,
        )
        run_on_threads(decode_kernel(shape), args.ctypes.data, num_threads)
        return AttnState(out_RHD, lse_RH)

    def _plan(self, batch: DecodeBatch, params: AttnParams) -> _Plan:
        rule = (params.window, params.sinks, params.local_chunk)
        plan = self._plans.get(rule)
        if plan is None or plan.batch is not batch:
            plan = self._plans[rule] = _Plan.of(batch, rule)
        return plan

    def _floats(self, count: int) -> np.ndarray:
        if self._scratch.size < count:
            self._scratch = np.empty(count, np.float32)
        return self._scratch


def _kernel_reads(layer: LayerKV) -> bool:
    """Formats that this processor decodes, on a CPU, each head's rows of a block contiguous."""
    return (
        layer.k.device.type == "cpu"
        and can_read(layer.k_format)
        and can_read(layer.v_format)
        and all(x.stride(2) == x.shape[3] and x.stride(3) == 1 for x in layer.tensors)
    )
