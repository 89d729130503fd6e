"""A tile's scores turned into weights, and partial states merged: the softmax of the decode kernel."""

# Shape legend: D head dim, G query heads per kv head.
from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import float32, njit, types
from numba.extending import intrinsic

from longctx.attention.kernels import vectors_numba
from longctx.attention.kernels.vectors_numba import (
    F32,
    I64,
    LANES,
    broadcast_at,
    int_types,
    lane,
    lane_sums,
    literals,
    plus,
    shuffle,
    splat,
    store_vector,
    vector_at,
)

# Neither 'nnan' nor 'ninf': a running maximum begins at -inf, and what is not a number must stay so. Nor 'reassoc':
# numba gives its flags to every instruction, and the order of sums is chosen.
FASTMATH = {"contract", "arcp", "nsz"}
inlined = njit(inline="always", fastmath=FASTMATH, nogil=True)


@intrinsic
def exp_negative(typingctx, x):
    """e^x for x <= 0; a loop over it is vectorized, as one over the C library's would not be."""

    def codegen(context, builder, signature, args):
        return vectors_numba.exp_negative(builder, args[0])

    return float32(float32), codegen


@intrinsic(prefer_literal=True)
def tile_weights(typingctx, scores, top, total, num_keys, tile_keys):
    """The scores at an address become weights relative to the running maximum at `top`; their sum goes to `total`.

    Returns the factor by which all that was summed before under the old maximum must shrink. `tile_keys` is a multiple
    of LANES; the scores from `num_keys` on become 0, whatever they are. A score that is no number stays so.
    """
    (tile_keys,) = literals(tile_keys)

    def codegen(context, builder, signature, args):
        scores, top, total, num_keys, _ = args
        wide = ir.VectorType(I64, LANES)
        last = builder.insert_element(ir.Constant(wide, ir.Undefined), num_keys, ir.Constant(I64, 0))
        last = lane(builder, last, 0, LANES)
        parts = []
        for at in range(0, tile_keys, LANES):
            used = builder.icmp_signed("<", ir.Constant(wide, list(range(at, at + LANES))), last)
            part = vector_at(builder, plus(builder, scores, 4 * at), F32, LANES)
            parts.append(builder.select(used, part, splat(F32, -math.inf, LANES)))
        most = parts[0]
        for part in parts[1:]:
            most = _larger(builder, part, most)
        while most.type.count > 1:
            half = most.type.count // 2
            halves = [shuffle(builder, most, most, range(i, i + half)) for i in (0, half)]
            most = _larger(builder, *halves)
        old_top = broadcast_at(builder, top, 1)
        new_top = _larger(builder, most, old_top)
        store_vector(builder, new_top, top)
        sums = splat(F32, 0.0, LANES)
        all_tops = lane(builder, new_top, 0, LANES)
        for at, part in zip(range(0, tile_keys, LANES), parts, strict=True):
            weights = vectors_numba.exp_negative(builder, builder.fsub(part, all_tops))
            store_vector(builder, weights, plus(builder, scores, 4 * at))
            sums = builder.fadd(sums, weights)
        shrink = vectors_numba.exp_negative(builder, builder.fsub(old_top, new_top))
        before = builder.fmul(vector_at(builder, total, F32, 1), shrink)
        store_vector(builder, builder.fadd(before, lane_sums(builder, [sums])), total)
        return builder.extract_element(shrink, ir.Constant(I64, 0))

    return float32(*(types.int64,) * 4, *int_types(tile_keys)), codegen


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger of each pair of lanes; `b` where one is no number."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@inlined
def merge_items(partial, num_items, stride, out, lse, D, G):
    """Merge partial states, `stride` floats apart, in ascending order into out [G, D] and lse [G]."""
    tops = G * D
    for g in range(G):
        top = float32(-np.inf)
        for i in range(num_items):
            top = max(top, partial[i * stride + tops + g])
        total = float32(0.0)
        for d in range(D):
            out[g * D + d] = float32(0.0)
        for i in range(num_items):
            weight = exp_negative(partial[i * stride + tops + g] - top)
            total += weight * partial[i * stride + tops + G + g]
            for d in range(D):
                out[g * D + d] += weight * partial[i * stride + g * D + d]
        # Scores that are no numbers leave nothing: say so in this row. An exception would end the thread and its other
        # items with it, which belong to other sequences.
        inverse = float32(1.0) / total if total > 0 else float32(np.nan)
        for d in range(D):
            out[g * D + d] *= inverse
        lse[g] = top + math.log(total) if total > 0 else float32(np.nan)
