"""How stored elements of each KV format become vectors of floats in registers, as LLVM code."""

# Shape legend: D head dim, E elements of one int4 group, C scales of a vector.
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from longctx.attention.kernels.vectors_numba import (
    F32,
    FEATURES,
    I8,
    I16,
    I32,
    LANES,
    bf16_floats,
    plus,
    splat,
    vector_at,
)
from longctx.quant.formats import FORMATS, KVFormat


def can_read(fmt: KVFormat) -> bool:
    """Whether this machine converts the format's elements in registers (half floats need F16C on x86)."""
    return not (fmt.name in ("fp16", "fp8_e4m3", "fp8_e5m2") and FEATURES.get("f16c") is False)


@dataclass(frozen=True)
class Load:
    """One vector read from a row: `count` stored elements from byte `byte` on, and which elements of the head dim
    they become, `count` from each of `starts` on. `group` is the scale group they belong to."""

    byte: int
    count: int
    starts: tuple[int, ...]
    group: int = 0


class Kind:
    """A format's elements as its kernels see them: a decoded element times `factor` times its scale is the value."""

    def __init__(self, fmt: KVFormat) -> None:
        self.format = fmt
        self.factor = 256.0 if fmt.name == "fp8_e4m3" else 1.0

    def row_bytes(self, dim: int) -> int:
        return self.format.data_bytes(dim)

    def loads(self, dim: int) -> list[Load]:
        """Vectors of at most LANES elements that make up a row of `dim`."""
        if self.format.group is None:
            size = self.format.bits // 8
            return [Load(at * size, n, (at,)) for at, n in _pieces(0, dim)]
        found = []
        for group, begin in enumerate(range(0, dim, self.format.group)):
            half = min(self.format.group, dim - begin) // 2
            for at, n in _pieces(0, half):
                found.append(Load(begin // 2 + at, n, (begin + at, begin + at + half), group))
        return found

    def floats(self, builder: ir.IRBuilder, row: ir.Value, load: Load) -> list[ir.Value]:
        """The vectors [count] of floats of one load, one for each of its `starts`; `row` is the row's address."""
        return _FLOATS[self.format.name](builder, row, load)

    def scales(self, builder: ir.IRBuilder, address: ir.Value, dim: int) -> ir.Value:
        """int4's bf16 steps and lowest values of one vector, as floats [C]."""
        return bf16_floats(builder, address, self.format.num_scales(dim))


def _pieces(begin: int, end: int) -> list[tuple[int, int]]:
    """(start, count) of the powers of two, at most LANES, that [begin, end) is read in."""
    found, width = [], LANES
    while begin < end:
        while width > end - begin:
            width //= 2
        found.append((begin, width))
        begin += width
    return found


def _fp32(builder: ir.IRBuilder, row: ir.Value, load: Load) -> list[ir.Value]:
    return [vector_at(builder, plus(builder, row, load.byte), F32, load.count)]


def _bf16(builder: ir.IRBuilder, row: ir.Value, load: Load) -> list[ir.Value]:
    return [bf16_floats(builder, plus(builder, row, load.byte), load.count)]


def _fp16(builder: ir.IRBuilder, row: ir.Value, load: Load) -> list[ir.Value]:
    return [_half_floats(builder, vector_at(builder, plus(builder, row, load.byte), I16, load.count))]


def _int8(builder: ir.IRBuilder, row: ir.Value, load: Load) -> list[ir.Value]:
    words = builder.sext(vector_at(builder, plus(builder, row, load.byte), I8, load.count), _words(load))
    return [builder.sitofp(words, ir.VectorType(F32, load.count))]


def _int4(builder: ir.IRBuilder, row: ir.Value, load: Load) -> list[ir.Value]:
    words = builder.zext(vector_at(builder, plus(builder, row, load.byte), I8, load.count), _words(load))
    halves = builder.and_(words, splat(I32, 15, load.count)), builder.lshr(words, splat(I32, 4, load.count))
    return [builder.sitofp(half, ir.VectorType(F32, load.count)) for half in halves]


def _e5m2(builder: ir.IRBuilder, row: ir.Value, load: Load) -> list[ir.Value]:
    """The upper byte of a half float."""
    codes = vector_at(builder, plus(builder, row, load.byte), I8, load.count)
    bits = builder.shl(builder.zext(codes, ir.VectorType(I16, load.count)), splat(I16, 8, load.count))
    return [_half_floats(builder, bits)]


def _e4m3(builder: ir.IRBuilder, row: ir.Value, load: Load) -> list[ir.Value]:
    """Exponent and mantissa put where a half float has them: that is 1/256 of the value, subnormal or not."""
    codes = vector_at(builder, plus(builder, row, load.byte), I8, load.count)
    bits = builder.shl(builder.sext(codes, ir.VectorType(I16, load.count)), splat(I16, 7, load.count))
    return [_half_floats(builder, builder.and_(bits, splat(I16, 0xBFFF, load.count)))]


def _half_floats(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    count = bits.type.count
    halves = builder.bitcast(bits, ir.VectorType(ir.HalfType(), count))
    return builder.fpext(halves, ir.VectorType(F32, count))


def _words(load: Load) -> ir.VectorType:
    return ir.VectorType(I32, load.count)


_FLOATS: dict[str, Callable[[ir.IRBuilder, ir.Value, Load], list[ir.Value]]] = {
    "fp32": _fp32,
    "bf16": _bf16,
    "fp16": _fp16,
    "fp8_e4m3": _e4m3,
    "fp8_e5m2": _e5m2,
    "int8": _int8,
    "int4": _int4,
}

KINDS = tuple(Kind(FORMATS[name]) for name in _FLOATS)
"""Every kind; kernels are given one by its place here, since only numbers may be constants of compiled code."""
KIND_OF = {kind.format.name: place for place, kind in enumerate(KINDS)}
