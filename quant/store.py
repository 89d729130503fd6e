"""Writing projected keys and values into a pool's slots, and gathering a range of positions back out, decoded."""

# Shape legend: T new tokens, S gathered tokens, n blocks, K kv heads, B block tokens, D head dim.
from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from longctx.quant.codes_numba import CODED
from longctx.quant.cpu_store import gather_coded, store_coded
from longctx.quant.formats import KVFormat
from longctx.quant.layout import LayerKV

# Beyond this many runs of neighbouring rows, one indexed write is cheaper than a copy for each run.
MAX_RUNS = 16


class StoreKernels(NamedTuple):
    """`store_tokens`, and `gather_tokens` into given tensors, to the same bits as the codecs."""

    store: Callable[[LayerKV, np.ndarray | torch.Tensor, np.ndarray | torch.Tensor, torch.Tensor, torch.Tensor], None]
    gather: Callable[[LayerKV, np.ndarray, int, int, tuple[torch.Tensor, torch.Tensor]], None]


_KERNELS: dict[str, StoreKernels] = {}


def use_kernels(device_type: str, kernels: StoreKernels | None) -> None:
    """From now on serve this process's pools on such devices with `kernels`; None: with the codecs.

    Called by who brings the kernels, so that nobody without such a device imports them.
    """
    if kernels is None:
        _KERNELS.pop(device_type, None)
    else:
        _KERNELS[device_type] = kernels


def store_tokens(
    layer: LayerKV,
    slots_T: np.ndarray | torch.Tensor,
    rows_T: np.ndarray | torch.Tensor,
    k_KTD: torch.Tensor,
    v_KTD: torch.Tensor,
) -> None:
    """Write token t's vectors into row `rows_T[t]` of slot `slots_T[t]`, in the pool's stored format.

    `k_KTD` [K, T, Dk] and `v_KTD` [K, T, Dv] may be strided. No two tokens may share a place.
    """
    assert k_KTD.shape[1] == v_KTD.shape[1] == len(slots_T) == len(rows_T)
    if kernels := _KERNELS.get(layer.k.device.type):
        kernels.store(layer, slots_T, rows_T, k_KTD, v_KTD)
        return
    sides = ((layer.k_format, layer.k, layer.k_scale, k_KTD), (layer.v_format, layer.v, layer.v_scale, v_KTD))
    for fmt, data, scale, new_KTD in sides:
        if data.device.type == "cpu" and scale is not None and fmt.name in CODED:
            store_coded(fmt, data, scale, np.asarray(slots_T), np.asarray(rows_T), new_KTD)
            continue
        new_data, new_scale = fmt.codec.encode(new_KTD)
        _write(data, slots_T, rows_T, new_data)
        if scale is not None and new_scale is not None:
            _write(scale, slots_T, rows_T, new_scale)


def _write(
    stored_NKBS: torch.Tensor,
    slots_T: np.ndarray | torch.Tensor,
    rows_T: np.ndarray | torch.Tensor,
    new_KTS: torch.Tensor,
) -> None:
    if stored_NKBS.device.type == "cpu":
        slots, rows = np.asarray(slots_T), np.asarray(rows_T)
        runs = _neighbour_runs(slots, rows)
        if len(runs) <= MAX_RUNS or len(runs) * MAX_RUNS <= len(slots):
            for begin, end in runs:
                slot, row = int(slots[begin]), int(rows[begin])
                stored_NKBS[slot, :, row : row + end - begin].copy_(new_KTS[:, begin:end])
            return
    device = stored_NKBS.device
    slots_at, rows_at = (torch.as_tensor(x, dtype=torch.int64, device=device) for x in (slots_T, rows_T))
    stored_NKBS[slots_at, :, rows_at] = new_KTS.transpose(0, 1)


def _neighbour_runs(slots: np.ndarray, rows: np.ndarray) -> list[tuple[int, int]]:
    """Maximal ranges of tokens that lie in one slot in ascending, gapless rows."""
    if len(slots) == 1:
        return [(0, 1)]
    breaks = np.flatnonzero((slots[1:] != slots[:-1]) | (rows[1:] != rows[:-1] + 1)) + 1
    edges = [0, *breaks.tolist(), len(slots)]
    return [(begin, end) for begin, end in pairwise(edges) if begin < end]


def gather_tokens(
    layer: LayerKV,
    table: np.ndarray,
    start: int,
    length: int,
    padded_length: int | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of positions [start, start + length) of a sequence: k [K, S, Dk] and v [K, S, Dv], S = padded_length.

    Rows [length, S) and those of null blocks are zero and no other row of a block is read: unwritten rows may hold
    NaN. fp32 unless `out`, a pair of tensors of exactly these shapes, says otherwise.
    """
    total = length if padded_length is None else padded_length
    assert 0 <= length <= total and start >= 0
    if out is None:
        k_KSD, v_KSD = (
            torch.empty(layer.k.shape[1], total, dim, dtype=torch.float32, device=layer.k.device)
            for dim in (layer.k_dim, layer.v_dim)
        )
        out = (k_KSD, v_KSD)
    assert out[0].shape[1] == out[1].shape[1] == total
    if kernels := _KERNELS.get(layer.k.device.type):
        kernels.gather(layer, table, start, length, out)
        return out
    sides = ((layer.k_format, layer.k, layer.k_scale, out[0]), (layer.v_format, layer.v, layer.v_scale, out[1]))
    for fmt, data, scale, target_KSD in sides:
        if total > length:
            target_KSD[:, length:].zero_()
        if (
            layer.k.device.type == "cpu"
            and target_KSD.dtype == torch.float32
            and scale is not None
            and fmt.name in CODED
        ):
            gather_coded(fmt, data, scale, table, start, length, target_KSD)
        else:
            _gather(fmt, data, scale, table, start, length, target_KSD)
    return out


def _gather(
    fmt: KVFormat,
    data_NKBS: torch.Tensor,
    scale_NKBC: torch.Tensor | None,
    table: np.ndarray,
    start: int,
    length: int,
    target_KSD: torch.Tensor,
) -> None:
    block = data_NKBS.shape[2]
    position, end = start, start + length
    while position < end:
        slot, row = int(table[position // block]), position % block
        # A block that slid out of the window is the null block: masked, but its rows must be numbers.
        num_blocks = 1 if row or slot == 0 else _consecutive_slots(table, position // block, end // block)
        count = num_blocks * block if num_blocks > 1 else min(block - row, end - position)
        into_KSD = target_KSD[:, position - start : position - start + count]
        if slot == 0:
            into_KSD.zero_()
        elif num_blocks > 1:
            at = slice(slot, slot + num_blocks)
            scale_KnBC = None if scale_NKBC is None else scale_NKBC[at].transpose(0, 1)
            fmt.codec.decode(data_NKBS[at].transpose(0, 1), scale_KnBC, into_KSD.unflatten(1, (num_blocks, block)))
        else:
            rows = slice(row, row + count)
            scale_KSC = None if scale_NKBC is None else scale_NKBC[slot, :, rows]
            fmt.codec.decode(data_NKBS[slot, :, rows], scale_KSC, into_KSD)
        position += count


def _consecutive_slots(table: np.ndarray, first: int, end: int) -> int:
    """How many blocks from `first` on, below `end`, lie in slots that follow each other; at least 1."""
    if end - first <= 1:
        return 1
    steps = np.flatnonzero(np.diff(table[first:end]) != 1)
    return int(steps[0]) + 1 if len(steps) else end - first
