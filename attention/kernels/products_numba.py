"""The two products of attention over a tile of stored keys, as LLVM code: scores of keys, weighted sums of values."""

# Shape legend: D head dim, G query heads per kv head, C scales of a vector.
#
# Rows of a tile are contiguous. An element is converted once for all query heads of its kv head, in registers: nothing
# decoded is ever stored. Sums are kept in vectors of LANES, so that the compiler has nothing to guess, and the order of
# every sum is what is written here.
from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from longctx.attention.kernels.kinds_numba import KINDS, Kind, Load
from longctx.attention.kernels.vectors_numba import (
    F32,
    I64,
    LANES,
    REGISTERS,
    broadcast_at,
    cut,
    int_types,
    lane,
    lane_sums,
    literals,
    loop,
    multiply_add,
    plus,
    prefetch,
    splat,
    store_vector,
    vector_at,
    widened,
)

LINE = 64


def keys_at_once(group: int) -> int:
    """Keys whose scores are summed together, so that a query's elements are loaded once for all of them."""
    return next(n for n in (4, 2, 1) if n * group <= REGISTERS or n == 1)


@intrinsic(prefer_literal=True)
def score_keys(typingctx, q, k, k_scale, scores, ahead, dim, group, kind, num_keys, tile_keys):
    """scores[g, j] = q[g] . k[j] for `num_keys` rows at `k`, in code units where the format has one scale per vector.

    Addresses of q [G, D] fp32, of rows and their scales, of scores [G, tile_keys]; `ahead` is prefetched, as many bytes
    as the keys have.
    """
    dim, group, kind, num_keys, tile_keys = literals(dim, group, kind, num_keys, tile_keys)

    def codegen(context, builder, signature, args):
        q, k, k_scale, scores, ahead = args[:5]
        for line in range(0, num_keys * KINDS[kind].row_bytes(dim), LINE):
            prefetch(builder, plus(builder, ahead, line))
        for heads in cut(range(group), max(1, REGISTERS // num_keys)):
            sums = _dots(builder, (q, k, k_scale), dim, KINDS[kind], num_keys, heads)
            for g, of_keys in zip(heads, sums, strict=True):
                store_vector(builder, lane_sums(builder, of_keys), plus(builder, scores, 4 * g * tile_keys))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5, *int_types(dim, group, kind, num_keys, tile_keys)), codegen


@intrinsic(prefer_literal=True)
def add_values(typingctx, v, weights, lows, out, ahead, num_keys, dim, group, kind, tile_keys, ahead_bytes):
    """out[g] += sum over j of weights[g, j] * v[j] for the `num_keys` > 0 rows at `v`.

    Addresses of rows, of weights, of out [G, D] fp32. Weights are [G, tile_keys] and carry the format's scale; int4's
    are [tile_keys, G, C], of which step by step the even ones are used, and `lows` [G, C] has in its odd ones what to
    add to every element of a group. `ahead` is prefetched, `ahead_bytes` for each key.
    """
    dim, group, kind, tile_keys, ahead_bytes = literals(dim, group, kind, tile_keys, ahead_bytes)

    def codegen(context, builder, signature, args):
        of = KINDS[kind]
        loads = of.loads(dim)
        for heads in cut(range(group), REGISTERS * 2 // 3):
            per_strip = max(1, min(8, REGISTERS * 2 // 3 // len(heads)) // len(loads[0].starts))
            strips = cut(loads, per_strip)
            for i, strip in enumerate(strips):
                lines = [
                    line
                    for line in range(0, ahead_bytes, LINE)
                    if heads[0] == 0 and i * ahead_bytes <= line * len(strips) < (i + 1) * ahead_bytes
                ]
                _add_strip(builder, args[:6], dim, of, tile_keys, group, heads, strip, lines, ahead_bytes)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6, *int_types(dim, group, kind, tile_keys, ahead_bytes)), codegen


@intrinsic(prefer_literal=True)
def scale_weights(typingctx, weights, v_scale, scaled, lows, num_keys, dim, group, kind, tile_keys):
    """int4: scaled[j, g, c] = weights[g, j] * scale[j, c], and lows[g, c] their sums over `num_keys` > 0 keys."""
    dim, group, kind, tile_keys = literals(dim, group, kind, tile_keys)

    def codegen(context, builder, signature, args):
        weights, v_scale, scaled, lows, num_keys = args[:5]
        width = KINDS[kind].format.num_scales(dim)

        def body(j, sums):
            at = builder.add(v_scale, builder.mul(j, ir.Constant(I64, KINDS[kind].format.scale_bytes(dim))))
            scales = KINDS[kind].scales(builder, at, dim)
            weight_at = builder.add(weights, builder.shl(j, ir.Constant(I64, 2)))
            scaled_at = builder.add(scaled, builder.mul(j, ir.Constant(I64, 4 * group * width)))
            after = []
            for g, total in enumerate(sums):
                weight = broadcast_at(builder, plus(builder, weight_at, 4 * g * tile_keys), width)
                product = builder.fmul(weight, scales)
                store_vector(builder, product, plus(builder, scaled_at, 4 * g * width))
                after.append(builder.fadd(total, product))
            return after

        for g, total in enumerate(loop(builder, num_keys, [splat(F32, 0.0, width)] * group, body)):
            store_vector(builder, total, plus(builder, lows, 4 * g * width))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5, *int_types(dim, group, kind, tile_keys)), codegen


def _dots(
    builder: ir.IRBuilder, args: Sequence[ir.Value], dim: int, kind: Kind, num_keys: int, heads: Sequence[int]
) -> list[list[ir.Value]]:
    """Sums [heads][num_keys] in vectors of LANES, yet to be summed over their lanes."""
    q, k, k_scale = args
    grouped = kind.format.group is not None
    rows = [plus(builder, k, j * kind.row_bytes(dim)) for j in range(num_keys)]
    scales = []
    if grouped:
        at = [plus(builder, k_scale, j * kind.format.scale_bytes(dim)) for j in range(num_keys)]
        scales = [kind.scales(builder, address, dim) for address in at]
    sums = [[splat(F32, 0.0, LANES) for _ in range(num_keys)] for _ in heads]
    for load in kind.loads(dim):
        of_keys = [kind.floats(builder, row, load) for row in rows]
        for part, start in enumerate(load.starts):
            keys = [vectors[part] for vectors in of_keys]
            if grouped:
                keys = [_from_codes(builder, x, s, load) for x, s in zip(keys, scales, strict=True)]
            keys = [widened(builder, x) for x in keys]
            for i, g in enumerate(heads):
                query = widened(builder, vector_at(builder, plus(builder, q, 4 * (g * dim + start)), F32, load.count))
                sums[i] = [multiply_add(builder, x, query, total) for x, total in zip(keys, sums[i], strict=True)]
    return sums


def _add_strip(
    builder: ir.IRBuilder,
    args: Sequence[ir.Value],
    dim: int,
    kind: Kind,
    tile_keys: int,
    group: int,
    heads: Sequence[int],
    strip: Sequence[Load],
    lines: Sequence[int],
    ahead_bytes: int,
) -> None:
    """All keys of a tile into one strip of elements, whose sums stay in registers meanwhile."""
    v, weights, lows, out, ahead, num_keys = args
    width = kind.format.num_scales(dim) if kind.format.group is not None else 0
    key_step, head_step = (4 * group * width, 4 * width) if width else (4, 4 * tile_keys)
    places = [(g, load, start) for load in strip for start in load.starts for g in heads]

    def out_at(g: int, start: int) -> ir.Value:
        return plus(builder, out, 4 * (g * dim + start))

    begin = []
    for g, load, start in places:
        total = vector_at(builder, out_at(g, start), F32, load.count)
        if width:
            low = broadcast_at(builder, plus(builder, lows, 4 * (g * width + 2 * load.group + 1)), load.count)
            total = builder.fadd(total, low)
        begin.append(total)

    def body(j, sums):
        row = builder.add(v, builder.mul(j, ir.Constant(I64, kind.row_bytes(dim))))
        weight_at = builder.add(weights, builder.mul(j, ir.Constant(I64, key_step)))
        if lines:
            next_row = builder.add(ahead, builder.mul(j, ir.Constant(I64, ahead_bytes)))
            for line in lines:
                prefetch(builder, plus(builder, next_row, line))
        values = [x for load in strip for x in kind.floats(builder, row, load)]
        after = []
        for place, total in enumerate(sums):
            g, load, _ = places[place]
            at = plus(builder, weight_at, g * head_step + (8 * load.group if width else 0))
            after.append(
                multiply_add(builder, values[place // len(heads)], broadcast_at(builder, at, load.count), total)
            )
        return after

    for (g, _, start), total in zip(places, loop(builder, num_keys, begin, body), strict=True):
        store_vector(builder, total, out_at(g, start))


def _from_codes(builder: ir.IRBuilder, codes: ir.Value, scales_C: ir.Value, load: Load) -> ir.Value:
    """int4: low + code * step of the load's group."""
    step, low = (lane(builder, scales_C, 2 * load.group + i, load.count) for i in (0, 1))
    return multiply_add(builder, codes, step, low)
