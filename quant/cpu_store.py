"""Storing and gathering coded vectors on a CPU by compiled kernels: one pass over each vector, to the codecs' bits."""

# Shape legend: T new tokens, S gathered tokens, K kv heads, D head dim.
from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numba import carray, float32

from longctx.quant import codes_numba
from longctx.quant.codes_numba import CODED, decode_vector, decoded_bytes, encode_vector, largest_code, vector_bytes
from longctx.quant.formats import KVFormat
from longctx.quant.memory_numba import compile_kernel, float_at, int_at

ARGS = np.dtype(
    [
        *((name, np.int64) for name in ("num_tokens", "num_kv_heads", "dim", "start", "block_tokens")),
        *((f"{name}_bytes", np.int64) for name in ("data_slot", "data_head", "scale_slot", "scale_head")),
        *((f"{name}_bytes", np.int64) for name in ("float_head", "float_token")),
        *((name, np.int64) for name in ("data", "scales", "floats", "slots", "rows", "table")),
        ("largest", np.float32),
    ]
)
"""What a kernel is given: counts, strides, addresses. Storing reads `floats` and writes token t to row `rows[t]` of
slot `slots[t]`; gathering writes `floats` from position `start` on of the sequence whose block table is `slots`.
`table` has what the codes of fp8 are."""


def store_coded(
    fmt: KVFormat,
    data_NKBS: torch.Tensor,
    scale_NKBC: torch.Tensor,
    slots_T: np.ndarray,
    rows_T: np.ndarray,
    x_KTD: torch.Tensor,
) -> None:
    """Write x [K, T, D] in a format of `CODED` to its places."""
    x_KTD = x_KTD.float()
    if x_KTD.stride(2) != 1:
        x_KTD = x_KTD.contiguous()
    slots_T, rows_T = (np.ascontiguousarray(x, np.int64) for x in (slots_T, rows_T))
    args = _args(fmt, data_NKBS, scale_NKBC, x_KTD, (slots_T, rows_T), len(slots_T), 0)
    _store_kernel(fmt.name)(args.ctypes.data)


def gather_coded(
    fmt: KVFormat,
    data_NKBS: torch.Tensor,
    scale_NKBC: torch.Tensor,
    table: np.ndarray,
    start: int,
    length: int,
    out_KSD: torch.Tensor,
) -> None:
    """Read positions [start, start + length) of a sequence into the first rows of out [K, S, D] fp32, its rows
    contiguous; rows of null blocks become zero."""
    assert out_KSD.dtype == torch.float32 and out_KSD.stride(2) == 1
    table = np.ascontiguousarray(table, np.int64)
    args = _args(fmt, data_NKBS, scale_NKBC, out_KSD, (table, table), length, start)
    _gather_kernel(fmt.name)(args.ctypes.data)


def _args(
    fmt: KVFormat,
    data_NKBS: torch.Tensor,
    scale_NKBC: torch.Tensor,
    floats_KTD: torch.Tensor,
    places: tuple[np.ndarray, np.ndarray],
    num_tokens: int,
    start: int,
) -> np.ndarray:
    assert data_NKBS.stride(2) == data_NKBS.shape[3] and scale_NKBC.stride(2) == scale_NKBC.shape[3]
    data_size, scale_size = data_NKBS.element_size(), scale_NKBC.element_size()
    is_fp8 = fmt.torch_dtype.is_floating_point
    values = (
        *(num_tokens, data_NKBS.shape[1], floats_KTD.shape[2], start, data_NKBS.shape[2]),
        *(data_NKBS.stride(0) * data_size, data_NKBS.stride(1) * data_size),
        *(scale_NKBC.stride(0) * scale_size, scale_NKBC.stride(1) * scale_size),
        *(floats_KTD.stride(0) * 4, floats_KTD.stride(1) * 4),
        *(data_NKBS.data_ptr(), scale_NKBC.data_ptr(), floats_KTD.data_ptr()),
        *(x.ctypes.data for x in places),
        _fp8_table(fmt.name).ctypes.data if is_fp8 else 0,
        largest_code(fmt.name) if fmt.group is None else 0.0,
    )
    return np.array(values, ARGS)


@cache
def _fp8_table(name: str) -> np.ndarray:
    return decoded_bytes(name)


@cache
def _store_kernel(name: str) -> Callable[[int], None]:
    FORMAT = CODED[name]

    def kernel(record):
        a = carray(record, 1)[0]
        slots, rows = int_at(a.slots), int_at(a.rows)
        row_bytes, scale_bytes = vector_bytes(a.dim, FORMAT)
        for t in range(a.num_tokens):
            for head in range(a.num_kv_heads):
                x = float_at(a.floats + head * a.float_head_bytes + t * a.float_token_bytes)
                data = a.data + slots[t] * a.data_slot_bytes + head * a.data_head_bytes + rows[t] * row_bytes
                scales = a.scales + slots[t] * a.scale_slot_bytes + head * a.scale_head_bytes + rows[t] * scale_bytes
                encode_vector(x, data, scales, a.largest, a.dim, FORMAT)

    return compile_kernel(kernel, f"store_{name}", ARGS, (codes_numba,)).ctypes


@cache
def _gather_kernel(name: str) -> Callable[[int], None]:
    FORMAT = CODED[name]

    def kernel(record):
        a = carray(record, 1)[0]
        blocks, table = int_at(a.slots), float_at(a.table)
        row_bytes, scale_bytes = vector_bytes(a.dim, FORMAT)
        for head in range(a.num_kv_heads):
            for t in range(a.num_tokens):
                out = float_at(a.floats + head * a.float_head_bytes + t * a.float_token_bytes)
                slot, row = blocks[(a.start + t) // a.block_tokens], (a.start + t) % a.block_tokens
                data = a.data + slot * a.data_slot_bytes + head * a.data_head_bytes + row * row_bytes
                scales = a.scales + slot * a.scale_slot_bytes + head * a.scale_head_bytes + row * scale_bytes
                if slot == 0:
                    # A block that slid out of the window: masked, but its rows must be numbers.
                    for d in range(a.dim):
                        out[d] = float32(0.0)
                else:
                    decode_vector(data, scales, table, out, a.dim, FORMAT)

    return compile_kernel(kernel, f"gather_{name}", ARGS, (codes_numba,)).ctypes
