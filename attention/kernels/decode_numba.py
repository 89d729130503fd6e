"""Paged fp32 decode attention for CPUs: one kernel per (head dim, group size), compiled by numba on first use."""

# Shape legend: R sequences, H query heads, K kv heads, G query heads per kv head, B block tokens, D head dim.
#
# The keys of a sequence are split at multiples of SPLIT_TOKENS. One item is one split of one kv head of one sequence,
# for all its G query heads, so that keys and values are read once. Threads take items from a shared counter; whoever
# finishes the last item of a (sequence, kv head) merges its partial states in ascending order. Nothing in a row's
# arithmetic depends on who computed what, or on the other rows.
from __future__ import annotations

import math
from functools import cache

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, float32, from_dtype, int32, int64, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

SPLIT_TOKENS = 256
TILE_KEYS = 16
"""Keys whose scores are computed before their values are read. Each pass prefetches the other stream's next pass, and
that distance was the fastest of 16 to 128 (without prefetching, a third of the bandwidth is lost)."""

ARGS = np.dtype(
    [
        *((name, np.int64) for name in ("num_items", "num_kv_heads", "block_tokens", "max_blocks", "window")),
        *((name, np.int64) for name in ("k_slot_stride", "k_head_stride", "v_slot_stride", "v_head_stride")),
        *((name, np.int64) for name in ("q", "k", "v", "out", "lse", "tables", "positions")),
        *((name, np.int64) for name in ("item_row", "item_split", "row_items", "progress", "partial")),
        *((name, np.float32) for name in ("scale", "softcap")),
    ]
)
"""What a kernel is given: counts, strides in elements, addresses of contiguous arrays, window and softcap 0 for none.
`item_row`, `item_split` [num_items] and `row_items` [R + 1] (a row's first item) are the plan, each item standing for
all K heads. `progress` [1 + R * K] is zero: the next item, then the items done of each (row, head). `partial` has
`item_floats` floats per item and head."""

# Neither 'nnan' nor 'ninf': a running maximum begins at -inf.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
_inlined = njit(inline="always", fastmath=FASTMATH, nogil=True)


def item_floats(dim: int, group: int) -> int:
    """Floats of an item's partial state: out [G, D], scores' scratch [G, TILE_KEYS], top [G], total [G]; aligned."""
    return -(-group * (dim + TILE_KEYS + 2) // 16) * 16


def _address_intrinsic(element: types.Type, ir_type: ir.Type):
    @intrinsic
    def at(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], ir_type.as_pointer())

        return types.CPointer(element)(types.int64), codegen

    return at


_float_at = _address_intrinsic(float32, ir.FloatType())
_int_at = _address_intrinsic(int64, ir.IntType(64))


@intrinsic
def _fetch_add(typingctx, address, value):
    """Atomically add to the int64 at `address`; returns what was there."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return int64(int64, int64), codegen


@intrinsic
def _float_of_bits(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return float32(int32), codegen


@intrinsic
def _prefetch(typingctx, address):
    """Ask for the cache line at `address` (any value: never a fault), to keep in the second-level cache."""

    def codegen(context, builder, signature, args):
        byte_pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, locality, data = (ir.Constant(word, x) for x in (0, 2, 1))
        builder.call(function, [builder.inttoptr(args[0], byte_pointer), read, locality, data])
        return context.get_dummy_value()

    return types.void(int64), codegen


@_inlined
def _exp(x):
    """e^x for x <= 0 to 2 ulp; a loop over it is vectorized, as one over the C library's would not be."""
    clamped = max(x, float32(-87.0))
    power = math.floor(clamped * float32(1.4426950408889634) + float32(0.5))
    # ln 2 in two parts (Cody and Waite), then the Taylor series on [-ln 2 / 2, ln 2 / 2].
    r = clamped - power * float32(0.693359375)
    r = r + power * float32(2.12194440e-4)
    series = float32(1 / 5040)
    series = series * r + float32(1 / 720)
    series = series * r + float32(1 / 120)
    series = series * r + float32(1 / 24)
    series = series * r + float32(1 / 6)
    series = series * r + float32(0.5)
    series = series * r + float32(1.0)
    series = series * r + float32(1.0)
    result = series * _float_of_bits((int32(power) + int32(127)) << int32(23))
    return result if x > float32(-87.0) else float32(0.0)


@_inlined
def _scores(q, k, num_keys, scores, scale, ahead, D, G):
    """scores[g, j] = scale * q[g] . k[j]: four keys at a time, so that a query element is loaded once for all."""
    quads = num_keys // 4 * 4
    for j in range(0, quads, 4):
        for line in range(0, 16 * D, 64):
            _prefetch(ahead + j * 4 * D + line)
        for g in range(G):
            s0 = s1 = s2 = s3 = float32(0.0)
            for d in range(D):
                x = q[g * D + d]
                s0 += x * k[j * D + d]
                s1 += x * k[(j + 1) * D + d]
                s2 += x * k[(j + 2) * D + d]
                s3 += x * k[(j + 3) * D + d]
            at = g * TILE_KEYS + j
            scores[at] = s0 * scale
            scores[at + 1] = s1 * scale
            scores[at + 2] = s2 * scale
            scores[at + 3] = s3 * scale
    for j in range(quads, num_keys):
        for g in range(G):
            s0 = float32(0.0)
            for d in range(D):
                s0 += q[g * D + d] * k[j * D + d]
            scores[g * TILE_KEYS + j] = s0 * scale


@_inlined
def _softmax(scores, num_keys, softcap, top, total, out, D, G):
    """Turn a tile's scores into weights relative to the running maximum, rescaling what was summed before."""
    for g in range(G):
        first = g * TILE_KEYS
        if softcap > 0:
            for j in range(first, first + num_keys):
                scores[j] = softcap * math.tanh(scores[j] / softcap)
        new_top = top[g]
        for j in range(first, first + num_keys):
            new_top = max(new_top, scores[j])
        if new_top > top[g]:
            shrink = _exp(top[g] - new_top)
            top[g] = new_top
            total[g] *= shrink
            for d in range(D):
                out[g * D + d] *= shrink
        tile_total = float32(0.0)
        for j in range(first, first + num_keys):
            weight = _exp(scores[j] - new_top)
            scores[j] = weight
            tile_total += weight
        total[g] += tile_total


@_inlined
def _accumulate(weights, v, num_keys, out, ahead, D, G):
    """out[g] += sum over j of weights[g, j] * v[j]: four keys at a time, so that `out` is touched once for all."""
    quads = num_keys // 4 * 4
    for j in range(0, quads, 4):
        for line in range(0, 16 * D, 64):
            _prefetch(ahead + j * 4 * D + line)
        for g in range(G):
            at = g * TILE_KEYS + j
            w0, w1, w2, w3 = weights[at], weights[at + 1], weights[at + 2], weights[at + 3]
            for d in range(D):
                out[g * D + d] += (
                    w0 * v[j * D + d] + w1 * v[(j + 1) * D + d] + w2 * v[(j + 2) * D + d] + w3 * v[(j + 3) * D + d]
                )
    for j in range(quads, num_keys):
        for g in range(G):
            w0 = weights[g * TILE_KEYS + j]
            for d in range(D):
                out[g * D + d] += w0 * v[j * D + d]


@_inlined
def _attend_item(a, row, split, head, partial, D, G):
    """The partial state of one item: out [G, D] (not yet divided), weights' scratch, top [G] and total [G]."""
    out, scores = _float_at(partial), _float_at(partial + 4 * G * D)
    top, total = _float_at(partial + 4 * G * (D + TILE_KEYS)), _float_at(partial + 4 * G * (D + TILE_KEYS + 1))
    for g in range(G):
        top[g] = float32(-np.inf)
        total[g] = float32(0.0)
    for d in range(G * D):
        out[d] = float32(0.0)
    q = _float_at(a.q + 4 * (row * a.num_kv_heads + head) * G * D)
    last = _int_at(a.positions)[row]
    position = split * SPLIT_TOKENS
    if a.window > 0:
        position = max(position, last - a.window + 1)
    end = min((split + 1) * SPLIT_TOKENS, last + 1)
    table = _int_at(a.tables + 8 * row * a.max_blocks)
    while position < end:
        slot, offset = table[position // a.block_tokens], position % a.block_tokens
        num_keys = min(min(TILE_KEYS, a.block_tokens - offset), end - position)
        k = a.k + 4 * (slot * a.k_slot_stride + head * a.k_head_stride + offset * D)
        v = a.v + 4 * (slot * a.v_slot_stride + head * a.v_head_stride + offset * D)
        position += num_keys
        slot, offset = table[min(position, end - 1) // a.block_tokens], position % a.block_tokens
        next_k = a.k + 4 * (slot * a.k_slot_stride + head * a.k_head_stride + offset * D)
        # Every pass over one stream fetches what the next pass over the other will read.
        _scores(q, _float_at(k), num_keys, scores, a.scale, v, D, G)
        _softmax(scores, num_keys, a.softcap, top, total, out, D, G)
        _accumulate(scores, _float_at(v), num_keys, out, next_k, D, G)


@_inlined
def _merge_items(partial, num_items, stride, out, lse, D, G):
    """Merge partial states, `stride` floats apart, in ascending order into out [G, D] and lse [G]."""
    tops = G * (D + TILE_KEYS)
    for g in range(G):
        top = float32(-np.inf)
        for i in range(num_items):
            top = max(top, partial[i * stride + tops + g])
        total = float32(0.0)
        for d in range(D):
            out[g * D + d] = float32(0.0)
        for i in range(num_items):
            weight = _exp(partial[i * stride + tops + g] - top)
            total += weight * partial[i * stride + tops + G + g]
            for d in range(D):
                out[g * D + d] += weight * partial[i * stride + g * D + d]
        # Scores that are no numbers leave nothing: say so in this row. An exception would end the thread and its other
        # items with it, which belong to other sequences.
        inverse = float32(1.0) / total if total > 0 else float32(np.nan)
        for d in range(D):
            out[g * D + d] *= inverse
        lse[g] = top + math.log(total) if total > 0 else float32(np.nan)


@cache
def decode_kernel(dim: int, group: int) -> int:
    """Address of the compiled kernel of a shape: a C function of the address of an `ARGS` record.

    Each thread that is to take part calls it once with the same record; the work is done when all have returned.
    """
    D, G = dim, group
    floats = item_floats(dim, group)

    @cfunc(types.void(types.CPointer(from_dtype(ARGS))), nopython=True, cache=True, fastmath=FASTMATH)
    def kernel(record):
        a = carray(record, 1)[0]
        heads = a.num_kv_heads
        while True:
            unit = _fetch_add(a.progress, 1)
            if unit >= a.num_items * heads:
                break
            item, head = unit // heads, unit % heads
            row = _int_at(a.item_row)[item]
            _attend_item(a, row, _int_at(a.item_split)[item], head, a.partial + 4 * unit * floats, D, G)
            first, end = _int_at(a.row_items)[row], _int_at(a.row_items)[row + 1]
            if _fetch_add(a.progress + 8 * (1 + row * heads + head), 1) == end - first - 1:
                partial = _float_at(a.partial + 4 * (first * heads + head) * floats)
                at = (row * heads + head) * G
                out, lse = _float_at(a.out + 4 * at * D), _float_at(a.lse + 4 * at)
                _merge_items(partial, end - first, heads * floats, out, lse, D, G)

    return kernel.address
