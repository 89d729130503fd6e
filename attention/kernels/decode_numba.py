"""Paged decode attention for CPUs: one kernel per (head dims, group size, formats), compiled by numba on first use."""

# Shape legend: R sequences, H query heads, K kv heads, G query heads per kv head, B block tokens, D head dim.
#
# The keys that a sequence sees are split at multiples of SPLIT_TOKENS. One item is one split of one kv head of one
# sequence, for all its G query heads, so that keys and values are read once. Threads take items from a shared counter;
# whoever finishes the last item of a (sequence, kv head) merges its partial states in ascending order. Nothing in a
# row's arithmetic depends on who computed what, or on the other rows.
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numba import carray, float32

from longctx.attention.kernels import kinds_numba, products_numba, softmax_numba, vectors_numba
from longctx.attention.kernels.kinds_numba import KIND_OF, KINDS
from longctx.attention.kernels.products_numba import add_values, keys_at_once, scale_weights, score_keys
from longctx.attention.kernels.softmax_numba import FASTMATH, inlined, merge_items, tile_weights
from longctx.quant.memory_numba import compile_kernel, fetch_add, float_at, int_at

SPLIT_TOKENS = 256
TILE_BYTES = 16384
"""Keys whose scores are computed before their values are read, in bytes. Each pass prefetches the other stream's next
pass, and that distance was the fastest (without prefetching, a third of the bandwidth is lost)."""

ARGS = np.dtype(
    [
        *((name, np.int64) for name in ("num_items", "num_kv_heads", "block_tokens", "max_blocks")),
        *((f"{name}_slot_bytes", np.int64) for name in ("k", "v", "k_scale", "v_scale")),
        *((f"{name}_head_bytes", np.int64) for name in ("k", "v", "k_scale", "v_scale")),
        *((name, np.int64) for name in ("k", "v", "k_scale", "v_scale", "q", "out", "lse", "tables")),
        *((name, np.int64) for name in ("item_row", "item_begin", "item_end", "row_items")),
        *((name, np.int64) for name in ("progress", "partial", "scratch")),
        *((name, np.float32) for name in ("scale", "softcap")),
    ]
)
"""What a kernel is given: counts, strides, addresses of contiguous arrays, softcap 0 for none. `item_row`, `item_begin`
and `item_end` [num_items] (positions) and `row_items` [R + 1] (a row's first item) are the plan, each item standing for
all K heads. `progress` [2 + R * K] is zero: the next item, the threads so far, the items done of each (row, head).
`partial` has `Shape.item_floats` for each item and head, `scratch` has `Shape.scratch_floats` for each thread."""


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for: head dims of K and V, query heads per kv head, names of the formats."""

    k_dim: int
    v_dim: int
    group: int
    k_format: str
    v_format: str

    @property
    def tile_keys(self) -> int:
        """Keys of a tile: 16, 32 or 64."""
        rows = TILE_BYTES // KINDS[KIND_OF[self.k_format]].row_bytes(self.k_dim)
        return 64 if rows >= 64 else 32 if rows >= 32 else 16

    @property
    def item_floats(self) -> int:
        """Floats of an item's partial state: out [G, Dv], top [G], total [G]; whole cache lines."""
        return _lines(self.group * (self.v_dim + 2))

    @property
    def scratch_floats(self) -> int:
        """Floats of a thread's scratch: queries [G, Dk], weights [G, tile], and those with a group's scale."""
        scales = KINDS[KIND_OF[self.v_format]].format.num_scales(self.v_dim)
        return _lines(self.group * (self.k_dim + self.tile_keys + scales * (self.tile_keys + 1)))


def _lines(num_floats: int) -> int:
    return -(-num_floats // 16) * 16


@inlined
def _times_scales(scores, scales, factor, num_keys, G, TILE):
    """scores[g, j] *= factor * scales[j]."""
    for g in range(G):
        for j in range(num_keys):
            scores[g * TILE + j] *= factor * scales[j]


@inlined
def _cap(scores, softcap, num_keys, G, TILE):
    for g in range(G):
        for j in range(g * TILE, g * TILE + num_keys):
            scores[j] = softcap * math.tanh(scores[j] / softcap)


@inlined
def _attend_item(
    a, item, head, partial, scratch, KD, VD, G, KEYS, TILE, KK, VK, KROW, VROW, KSCALE, VSCALE, KS, VS, KF, VF
):
    """The partial state of one item: out [G, VD] (not yet divided), top [G] and total [G]."""
    row = int_at(a.item_row)[item]
    tops_at, totals_at = partial + 4 * G * VD, partial + 4 * G * (VD + 1)
    out, top, total = float_at(partial), float_at(tops_at), float_at(totals_at)
    for g in range(G):
        top[g] = float32(-np.inf)
        total[g] = float32(0.0)
    for d in range(G * VD):
        out[d] = float32(0.0)
    q, query = float_at(a.q + 4 * (row * a.num_kv_heads + head) * G * KD), float_at(scratch)
    for d in range(G * KD):
        query[d] = a.scale * q[d]
    weights_at = scratch + 4 * G * KD
    scaled_at, scores = weights_at + 4 * G * TILE, float_at(weights_at)
    lows_at = scaled_at + 4 * G * TILE * VS
    position, end = int_at(a.item_begin)[item], int_at(a.item_end)[item]
    table = int_at(a.tables + 8 * row * a.max_blocks)
    while position < end:
        slot, offset = table[position // a.block_tokens], position % a.block_tokens
        num_keys = min(min(TILE, a.block_tokens - offset), end - position)
        k = a.k + slot * a.k_slot_bytes + head * a.k_head_bytes + offset * KROW
        v = a.v + slot * a.v_slot_bytes + head * a.v_head_bytes + offset * VROW
        k_scale = a.k_scale + slot * a.k_scale_slot_bytes + head * a.k_scale_head_bytes + offset * KSCALE
        v_scale = a.v_scale + slot * a.v_scale_slot_bytes + head * a.v_scale_head_bytes + offset * VSCALE
        position += num_keys
        slot, offset = table[min(position, end - 1) // a.block_tokens], position % a.block_tokens
        next_k = a.k + slot * a.k_slot_bytes + head * a.k_head_bytes + offset * KROW
        # Every pass over one stream fetches what the next pass over the other will read.
        together = num_keys // KEYS * KEYS
        for j in range(0, together, KEYS):
            at = weights_at + 4 * j
            score_keys(scratch, k + j * KROW, k_scale + j * KSCALE, at, v + j * VROW, KD, G, KK, KEYS, TILE)
        for j in range(together, num_keys):
            at = weights_at + 4 * j
            score_keys(scratch, k + j * KROW, k_scale + j * KSCALE, at, v + j * VROW, KD, G, KK, 1, TILE)
        if KS == 1:
            _times_scales(scores, float_at(k_scale), KF, num_keys, G, TILE)
        if a.softcap > 0:
            _cap(scores, a.softcap, num_keys, G, TILE)
        for g in range(G):
            shrink = tile_weights(weights_at + 4 * g * TILE, tops_at + 4 * g, totals_at + 4 * g, num_keys, TILE)
            if shrink != 1:
                for d in range(g * VD, (g + 1) * VD):
                    out[d] *= shrink
        if VS == 1:
            _times_scales(scores, float_at(v_scale), VF, num_keys, G, TILE)
        if VS > 1:
            scale_weights(weights_at, v_scale, scaled_at, lows_at, num_keys, VD, G, VK, TILE)
            add_values(v, scaled_at, lows_at, partial, next_k, num_keys, VD, G, VK, TILE, KROW)
        else:
            add_values(v, weights_at, weights_at, partial, next_k, num_keys, VD, G, VK, TILE, KROW)


@cache
def decode_kernel(shape: Shape) -> int:
    """Address of the compiled kernel of a shape: a C function of the address of an `ARGS` record.

    Each thread that is to take part calls it once with the same record; the work is done when all have returned.
    """
    KD, VD, G, KK, VK = shape.k_dim, shape.v_dim, shape.group, KIND_OF[shape.k_format], KIND_OF[shape.v_format]
    k_kind, v_kind = KINDS[KK], KINDS[VK]
    KROW, VROW, KEYS = k_kind.row_bytes(KD), v_kind.row_bytes(VD), keys_at_once(G)
    TILE = shape.tile_keys
    KSCALE, VSCALE = k_kind.format.scale_bytes(KD), v_kind.format.scale_bytes(VD)
    KS, VS = k_kind.format.num_scales(KD), v_kind.format.num_scales(VD)
    KF, VF = np.float32(k_kind.factor), np.float32(v_kind.factor)
    FLOATS, SCRATCH = shape.item_floats, shape.scratch_floats

    def kernel(record):
        a = carray(record, 1)[0]
        heads = a.num_kv_heads
        scratch = a.scratch + 4 * SCRATCH * fetch_add(a.progress + 8, 1)
        while True:
            unit = fetch_add(a.progress, 1)
            if unit >= a.num_items * heads:
                break
            item, head = unit // heads, unit % heads
            partial = a.partial + 4 * unit * FLOATS
            _attend_item(
                a,
                item,
                head,
                partial,
                scratch,
                KD,
                VD,
                G,
                KEYS,
                TILE,
                KK,
                VK,
                KROW,
                VROW,
                KSCALE,
                VSCALE,
                KS,
                VS,
                KF,
                VF,
            )
            row = int_at(a.item_row)[item]
            first, end = int_at(a.row_items)[row], int_at(a.row_items)[row + 1]
            if fetch_add(a.progress + 8 * (2 + row * heads + head), 1) == end - first - 1:
                partials = float_at(a.partial + 4 * (first * heads + head) * FLOATS)
                at = (row * heads + head) * G
                out, lse = float_at(a.out + 4 * at * VD), float_at(a.lse + 4 * at)
                merge_items(partials, end - first, heads * FLOATS, out, lse, VD, G)

    name = f"decode_{shape.k_format}_{KD}_{shape.v_format}_{VD}_group{G}"
    modules = (kinds_numba, products_numba, softmax_numba, vectors_numba)
    return compile_kernel(kernel, name, ARGS, modules, FASTMATH).address
