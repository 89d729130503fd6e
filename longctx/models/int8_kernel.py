"""Int8 products on all of torch's threads: rows are quantized, then multiplied with quantized weights."""

# Shape legend: N rows, I in features, P the same padded to whole groups, G groups of GROUP inputs, O out features.
#
# One call is two rounds, between which every thread waits for the others: rows to codes, then tiles of outputs. In both
# threads take units from a counter. Nothing in a row's arithmetic depends on who computed it, or on the other rows.
from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, float32, int8, int32, njit, types

from longctx.attention.kernels import vectors_numba
from longctx.attention.kernels.softmax_numba import exp_negative
from longctx.models import int8_tile
from longctx.models.int8_tile import GROUP, PANEL, TILES, WEIGHT_ZERO, make_tile
from longctx.quant.memory_numba import address_intrinsic, compile_kernel, fetch_add, float_at, float_of_bits

PLAIN, SILU, GELU_TANH = 0, 1, 2
"""What rows are before they are quantized: themselves, or act(left half) * right half."""

ROWS_PER_UNIT = 8
BLOCK_ROWS = 96
"""Rows of one unit of tiles: their codes stay in the second-level cache while a panel's weights stay in the first."""
UNIT_BYTES = 1 << 16
"""Weights of one unit where there is only one block of rows: long enough to be streamed."""

_SPINS = 1000
"""How often a thread looks whether the others have quantized their rows before it gives its core to others."""

ARGS = np.dtype(
    [
        *((name, np.int64) for name in ("rows", "inputs", "outs", "groups", "activation", "panels_per_unit")),
        *((name, np.int64) for name in ("x", "codes", "scales", "offsets", "tiles", "progress")),
        *((name, np.int64) for name in ("weights", "weight_scales", "bias", "out")),
    ]
)
"""What a call is given: counts, then addresses. x fp32 [N, I], or [N, 2 I] before an activation, which is computed in
place; codes int8 [N, P], scales fp32 and offsets int32 [N, G] are scratch, and so are tiles, TILE_FLOATS for each
thread. progress, four zeros: the units of either round that were taken, rows' units done, threads seen. weights as
`pack` made them; bias 0 for none; out fp32 [N, O]."""

TILE_FLOATS = max(rows for rows, _ in TILES) * PANEL

LARGEST = 127
SMALLEST = 2.0**-100
"""A group whose values are all smaller counts as zero: their reciprocal would not be a number."""

(_ROWS, _OUTS), _ = TILES
_many, _one = (make_tile(rows, outs) for rows, outs in TILES)
_inlined = njit(inline="always", nogil=True)
_give_way = types.ExternalFunction("sched_yield", int32())
_int32_at, _byte_at = address_intrinsic(int32, ir.IntType(32)), address_intrinsic(int8, ir.IntType(8))


@_inlined
def _quantize_row(x: int, codes: int, scales: int, offsets: int, inputs: int, groups: int) -> None:
    """One row's codes, group by group: x = code * scale. A value that is not finite makes its scale NaN."""
    values, bits, bytes_out = float_at(x), _int32_at(x), _byte_at(codes)
    for g in range(groups):
        first, end = g * GROUP, min((g + 1) * GROUP, inputs)
        top_bits = int32(0)
        for j in range(first, end):
            # Magnitudes are ordered like their bits, and those of infinity and NaN are the largest.
            top_bits = max(top_bits, bits[j] & int32(0x7FFFFFFF))
        finite = top_bits < int32(0x7F800000)
        top = float_of_bits(top_bits)
        inverse = float32(LARGEST) / top if finite and top >= float32(SMALLEST) else float32(0.0)
        total = int32(0)
        for j in range(first, end):
            code = int32(np.rint(values[j] * inverse)) if finite else int32(0)
            bytes_out[j] = int8(code)
            total += code
        for j in range(end, (g + 1) * GROUP):
            bytes_out[j] = int8(0)
        scale = top / float32(LARGEST) if inverse > 0 else float32(0.0)
        float_at(scales)[g] = scale if finite else float32(np.nan)
        _int32_at(offsets)[g] = int32(-WEIGHT_ZERO) * total


@_inlined
def _activate(x: int, inputs: int, activation: int) -> None:
    """act(left half) * right half, in the place of the left half."""
    values = float_at(x)
    for j in range(inputs):
        gate = values[j]
        # Both are gate * sigmoid(z); GELU's tanh form is one with z = 2 sqrt(2 / pi) (gate + 0.044715 gate^3).
        z = gate
        if activation == GELU_TANH:
            z = gate * float32(1.5957691216057308) * (float32(1.0) + float32(0.044715) * gate * gate)
        power = exp_negative(-abs(z))
        values[j] = gate * ((float32(1.0) if z >= 0 else power) / (float32(1.0) + power)) * values[inputs + j]


@_inlined
def _finish(tile: int, a: Any, row: int, num_rows: int, first_out: int) -> None:
    """Outputs of a tile: times their weights' scales, plus the bias."""
    sums, scales = float_at(tile), float_at(a.weight_scales + 4 * first_out)
    bias = float_at(a.bias + 4 * first_out)
    count = min(PANEL, a.outs - first_out)
    for r in range(num_rows):
        out = float_at(a.out + 4 * ((row + r) * a.outs + first_out))
        if a.bias == 0:
            for j in range(count):
                out[j] = sums[r * PANEL + j] * scales[j]
        else:
            for j in range(count):
                out[j] = sums[r * PANEL + j] * scales[j] + bias[j]


@_inlined
def _multiply(a: Any, tile: int, first_row: int, end_row: int, panel: int) -> None:
    """One panel's outputs of some rows."""
    padded = a.groups * GROUP
    weights = a.weights + panel * PANEL * padded
    row = first_row
    while row < end_row:
        codes, at = a.codes + row * padded, 4 * row * a.groups
        if end_row - row >= _ROWS:
            for first in range(0, PANEL, _OUTS):
                _many(codes, a.scales + at, a.offsets + at, weights + 4 * first, tile + 4 * first, a.groups)
            count = _ROWS
        else:
            _one(codes, a.scales + at, a.offsets + at, weights, tile, a.groups)
            count = 1
        _finish(tile, a, row, count, panel * PANEL)
        row += count


@cache
def product_kernel() -> int:
    """Address of the compiled kernel: a C function of the address of an `ARGS` record.

    Each thread that is to take part calls it once with the same record, all at the same time; the work is done when all
    have returned.
    """

    def kernel(record: Any) -> None:
        a = carray(record, 1)[0]
        width = a.inputs if a.activation == PLAIN else 2 * a.inputs
        num_units = (a.rows + ROWS_PER_UNIT - 1) // ROWS_PER_UNIT
        while True:
            unit = fetch_add(a.progress, 1)
            if unit >= num_units:
                break
            for row in range(unit * ROWS_PER_UNIT, min((unit + 1) * ROWS_PER_UNIT, a.rows)):
                x, at = a.x + 4 * row * width, 4 * row * a.groups
                if a.activation != PLAIN:
                    _activate(x, a.inputs, a.activation)
                _quantize_row(x, a.codes + row * a.groups * GROUP, a.scales + at, a.offsets + at, a.inputs, a.groups)
            fetch_add(a.progress + 16, 1)
        patience = _SPINS
        while fetch_add(a.progress + 16, 0) < num_units:
            patience -= 1
            if patience < 0:
                _give_way()
        tile = a.tiles + 4 * TILE_FLOATS * fetch_add(a.progress + 24, 1)
        panels = (a.outs + PANEL - 1) // PANEL
        chunks = (panels + a.panels_per_unit - 1) // a.panels_per_unit
        num_units = chunks * ((a.rows + BLOCK_ROWS - 1) // BLOCK_ROWS)
        while True:
            unit = fetch_add(a.progress + 8, 1)
            if unit >= num_units:
                break
            block, chunk = unit // chunks, unit % chunks
            first_row = block * BLOCK_ROWS
            end_row = min(first_row + BLOCK_ROWS, a.rows)
            for panel in range(chunk * a.panels_per_unit, min((chunk + 1) * a.panels_per_unit, panels)):
                _multiply(a, tile, first_row, end_row, panel)

    return compile_kernel(kernel, "int8_product", ARGS, (int8_tile, vectors_numba)).address
