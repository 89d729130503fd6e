"""The inner loop of int8 products, in vector instructions that a compiler does not find by itself."""

# Shape legend: rows of one tile, outs of one tile, PANEL outputs side by side, G groups of GROUP inputs.
#
# Stored weights are unsigned, code + 128: the instruction multiplies unsigned by signed bytes. What that adds to a sum
# is the same for all outputs, so it is taken off once per row and group, as the sum's first value. Four inputs of one
# output lie side by side, the outputs of a panel next to each other: a sum needs no other lane until it is done.
# Integer sums are exact, and groups are added in ascending order by fused multiply-adds. So an output has the same
# bits whatever the tile's size, the instruction set, and the other rows.
from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import int64, types
from numba.core import cgutils, config
from numba.extending import intrinsic

GROUP = 64
"""Inputs that share a scale in a quantized row."""
PANEL = 32
"""Outputs whose weights lie together."""
WEIGHT_ZERO = 128
_STEP = 4
"""Inputs of one multiply-add: a lane of 32 bits."""
_STEP_BYTES = _STEP * PANEL
_UNROLL = 4
_AHEAD = 16 * _STEP_BYTES
"""How far before its use a weight is asked for."""

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def cpu_features() -> frozenset[str]:
    """What numba compiles for: this CPU's features, or those that the environment names."""
    if config.CPU_FEATURES is not None:
        names = config.CPU_FEATURES.split(",")
        return frozenset(name.removeprefix("+") for name in names if name.startswith("+"))
    return frozenset(name for name, there in binding.get_host_cpu_features().items() if there)


HAS_VNNI = {"avx512vnni", "avx512f", "avx512vl"} <= cpu_features()
"""Whether bytes are multiplied and added four at a time. Elsewhere they are widened to 16 bits, whose products the
compiler adds in pairs in one instruction; the instruction of AVX2 that takes bytes saturates and is not exact."""

TILES = ((4, PANEL), (1, PANEL)) if HAS_VNNI else ((3, PANEL // 2), (1, PANEL))
"""Rows and outputs of the tile for many rows and of the one for what is left: as many sums as there are registers."""


class _Tile:
    """Emits one tile's loops. Addresses are int64 values; `builder` stands where the tile is to be computed."""

    def __init__(self, builder: ir.IRBuilder, rows: int, outs: int) -> None:
        self.builder, self.module = builder, builder.module
        self.rows, self.outs = rows, outs
        # Lanes of a running sum: whole outputs, or halves of them that are added up at a group's end.
        self.halves = 1 if HAS_VNNI else 2
        self.lanes = 16 if HAS_VNNI else 8
        self.sums_per_row = outs * self.halves // self.lanes
        self.floats_per_row = outs // self.lanes
        self.sum_type, self.float_type = ir.VectorType(_I32, self.lanes), ir.VectorType(_F32, self.lanes)

    def emit(self, x: Any, scales: Any, offsets: Any, weights: Any, out: Any, groups: Any) -> None:
        """sum over g of scales[r, g] * (offsets[r, g] + sum over i of x[r, i] * w[i, o]) to out [rows, PANEL]."""
        b = self.builder
        zero = ir.Constant(self.float_type, [0.0] * self.lanes)
        x_stride, group_stride = b.mul(groups, _int(GROUP)), b.mul(groups, _int(4))
        with self._loop(groups, [zero] * (self.rows * self.floats_per_row)) as outer:
            at = b.mul(outer.index, _int(4))
            group_x = b.add(x, b.mul(outer.index, _int(GROUP)))
            group_w = b.add(weights, b.mul(outer.index, _int(GROUP * PANEL)))
            starts = []
            for row in range(self.rows):
                place = b.add(b.add(offsets, b.mul(group_stride, _int(row))), at)
                starts += [self._first_sum(self._load(place, _I32))] * self.sums_per_row
            with self._loop(_int(GROUP // (_STEP * _UNROLL)), starts) as inner:
                values = inner.values
                for step in range(_UNROLL):
                    nth = b.add(b.mul(inner.index, _int(_UNROLL)), _int(step))
                    step_w = b.add(group_w, b.mul(nth, _int(_STEP_BYTES)))
                    values = self._step(values, b.add(group_x, b.mul(nth, _int(_STEP))), x_stride, step_w)
                inner.close(values)
            floats = []
            for row in range(self.rows):
                scale = self._load(b.add(b.add(scales, b.mul(group_stride, _int(row))), at), _F32)
                sums = inner.values[row * self.sums_per_row : (row + 1) * self.sums_per_row]
                before = outer.values[row * self.floats_per_row : (row + 1) * self.floats_per_row]
                for total, value in zip(self._whole(sums), before, strict=True):
                    number = b.sitofp(total, self.float_type)
                    floats.append(
                        self._call(f"llvm.fma.v{self.lanes}f32", [self._splat(scale, self.lanes), number, value])
                    )
            outer.close(floats)
        for n, value in enumerate(outer.values):
            row, column = divmod(n, self.floats_per_row)
            place = b.add(out, _int(4 * (row * PANEL + column * self.lanes)))
            b.store(value, b.inttoptr(place, self.float_type.as_pointer()), align=4)

    def _step(self, sums: list[Any], x: Any, x_stride: Any, weights: Any) -> list[Any]:
        """Add four inputs of every output to every sum."""
        b = self.builder
        sums = list(sums)
        if self.rows == 1:
            for line in range(0, self.outs * _STEP, 64):
                self._prefetch(b.add(weights, _int(_AHEAD + line)))
        columns = [self._weights(weights, n) for n in range(self.sums_per_row)]
        for row in range(self.rows):
            codes = self._row_codes(b.add(x, b.mul(x_stride, _int(row))))
            for n, column in enumerate(columns):
                at = row * self.sums_per_row + n
                sums[at] = self._multiply_add(sums[at], column, codes)
        return sums

    def _weights(self, weights: Any, n: int) -> Any:
        """The n-th vector of a step: bytes, or 16-bit numbers where bytes cannot be multiplied exactly."""
        size = 4 * self.lanes // self.halves
        place = self.builder.add(weights, _int(n * size))
        loaded = self._load(place, ir.VectorType(_I8, size))
        if HAS_VNNI:
            return self.builder.bitcast(loaded, self.sum_type)
        return self.builder.zext(loaded, ir.VectorType(_I16, size))

    def _row_codes(self, place: Any) -> Any:
        """A row's four inputs, for all outputs of a vector."""
        if HAS_VNNI:
            return self._splat(self._load(place, _I32), self.lanes)
        four = self.builder.sext(self._load(place, ir.VectorType(_I8, 4)), ir.VectorType(_I16, 4))
        return self._shuffle(four, four, list(range(4)) * 4)

    def _multiply_add(self, total: Any, weights: Any, codes: Any) -> Any:
        b = self.builder
        if HAS_VNNI:
            return self._call("llvm.x86.avx512.vpdpbusd.512", [total, weights, codes])
        wide = ir.VectorType(_I32, 16)
        products = b.mul(b.zext(weights, wide), b.sext(codes, wide))
        even, odd = (self._shuffle(products, products, list(range(first, 16, 2))) for first in (0, 1))
        return b.add(total, b.add(even, odd))

    def _first_sum(self, offset: Any) -> Any:
        """A sum's first value in every output; where an output is two halves, in the first."""
        whole = self._splat(offset, self.lanes)
        if self.halves == 1:
            return whole
        nothing = ir.Constant(self.sum_type, [0] * self.lanes)
        return self._shuffle(whole, nothing, [0, self.lanes] * (self.lanes // 2))

    def _whole(self, sums: list[Any]) -> list[Any]:
        """Sums with one lane per output."""
        if self.halves == 1:
            return sums
        pairs = zip(sums[::2], sums[1::2], strict=True)
        evens, odds = (list(range(first, 2 * self.lanes, 2)) for first in (0, 1))
        return [self.builder.add(self._shuffle(a, c, evens), self._shuffle(a, c, odds)) for a, c in pairs]

    def _load(self, place: Any, kind: ir.Type) -> Any:
        return self.builder.load(self.builder.inttoptr(place, kind.as_pointer()), align=1 if kind != _F32 else 4)

    def _splat(self, value: Any, lanes: int) -> Any:
        empty = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
        return self._shuffle(self.builder.insert_element(empty, value, ir.Constant(_I32, 0)), empty, [0] * lanes)

    def _shuffle(self, a: Any, c: Any, lanes: list[int]) -> Any:
        return self.builder.shuffle_vector(a, c, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))

    def _call(self, name: str, args: list[Any]) -> Any:
        kind = ir.FunctionType(args[0].type, [arg.type for arg in args])
        return self.builder.call(cgutils.get_or_insert_function(self.module, kind, name), args)

    def _prefetch(self, address: Any) -> None:
        pointer = _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(self.module, kind, "llvm.prefetch.p0")
        read, locality, data = (ir.Constant(_I32, x) for x in (0, 3, 1))
        self.builder.call(function, [self.builder.inttoptr(address, pointer), read, locality, data])

    def _loop(self, count: Any, values: list[Any]) -> _Loop:
        return _Loop(self.builder, count, values)


class _Loop:
    """A counted loop of at least one round that carries vectors in registers; `close` says their next values."""

    def __init__(self, builder: ir.IRBuilder, count: Any, values: list[Any]) -> None:
        self._builder, self._count, self._start = builder, count, values

    def __enter__(self) -> _Loop:
        b, before = self._builder, self._builder.block
        self._body, self._end = b.append_basic_block("body"), b.append_basic_block("end")
        b.branch(self._body)
        b.position_at_end(self._body)
        self.index = b.phi(_I64)
        self.index.add_incoming(_int(0), before)
        self.values: list[Any] = []
        for value in self._start:
            phi = b.phi(value.type)
            phi.add_incoming(value, before)
            self.values.append(phi)
        return self

    def close(self, values: list[Any]) -> None:
        """End a round; afterwards `values` are the last ones."""
        b = self._builder
        following = b.add(self.index, _int(1))
        for phi, value in zip(self.values, values, strict=True):
            phi.add_incoming(value, b.block)
        self.index.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, self._count), self._body, self._end)
        b.position_at_end(self._end)
        self.values = values

    def __exit__(self, *_: object) -> None:
        pass


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


def make_tile(rows: int, outs: int) -> Any:
    """A function for compiled code: tile(x, scales, offsets, weights, out, groups), all int64, of `rows` by `outs`.

    x: codes [rows, GROUP * groups]; scales fp32 and offsets int32 [rows, groups]; weights of a panel from the first of
    these outputs on; out fp32 [rows, PANEL] from its first output on.
    """

    @intrinsic
    def tile(typingctx: Any, x: Any, scales: Any, offsets: Any, weights: Any, out: Any, groups: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            _Tile(builder, rows, outs).emit(*args)
            return context.get_dummy_value()

        return types.void(*[int64] * 6), codegen

    return tile
