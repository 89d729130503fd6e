"""Vectors of floats in compiled kernels: what LLVM's builder lacks, in the words that the kernels are written in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)

FEATURES = binding.get_host_cpu_features()
LANES = 16 if FEATURES.get("avx512f") else 8
"""Floats in a vector: one AVX-512 register, one of AVX2, or two of NEON."""
REGISTERS = 24 if LANES == 16 else 10
"""Vectors of sums that may be kept at once beside keys, queries and weights."""


def vector_at(builder: ir.IRBuilder, address: ir.Value, element: ir.Type, count: int) -> ir.Value:
    """`count` elements at an address of any alignment."""
    return builder.load(pointer(builder, address, ir.VectorType(element, count)), align=1)


def store_vector(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    builder.store(value, pointer(builder, address, value.type), align=1)


def plus(builder: ir.IRBuilder, address: ir.Value, num_bytes: int) -> ir.Value:
    return builder.add(address, ir.Constant(I64, num_bytes)) if num_bytes else address


def splat(element: ir.Type, value: float, count: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, count), [value] * count)


def bf16_floats(builder: ir.IRBuilder, address: ir.Value, count: int) -> ir.Value:
    words = builder.zext(vector_at(builder, address, I16, count), ir.VectorType(I32, count))
    return builder.bitcast(builder.shl(words, splat(I32, 16, count)), ir.VectorType(F32, count))


def pointer(builder: ir.IRBuilder, address: ir.Value, to: ir.Type) -> ir.Value:
    return builder.inttoptr(address, to.as_pointer())


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line at `address` (any value: never a fault), to keep in the second-level cache."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, locality, data = (ir.Constant(I32, x) for x in (0, 2, 1))
    builder.call(function, [pointer(builder, address, I8), read, locality, data])


def cut(values: Sequence, size: int) -> list[Sequence]:
    """Neighbours in groups of `size`, the last one smaller."""
    return [values[at : at + size] for at in range(0, len(values), size)]


def literals(*values: types.Type) -> tuple[int, ...]:
    return tuple(x.literal_value for x in values)


def int_types(*values: int) -> tuple[types.Type, ...]:
    return tuple(types.literal(x) for x in values)


def loop(
    builder: ir.IRBuilder,
    count: ir.Value,
    begin: Sequence[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
) -> list[ir.Value]:
    """Run `body(j, values)` for j = 0 .. count-1, count > 0; returns the last values."""
    entry = builder.block
    loop, done = builder.append_basic_block("keys"), builder.append_basic_block("keys.done")
    builder.branch(loop)
    builder.position_at_end(loop)
    j = builder.phi(I64)
    values = [builder.phi(x.type) for x in begin]
    after = body(j, list(values))
    following = builder.add(j, ir.Constant(I64, 1))
    for phi, first, later in zip([j, *values], [ir.Constant(I64, 0), *begin], [following, *after], strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(later, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    return after


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def lane(builder: ir.IRBuilder, vector: ir.Value, lane: int, count: int) -> ir.Value:
    """One lane of a vector, `count` times."""
    return shuffle(builder, vector, vector, [lane] * count)


def broadcast_at(builder: ir.IRBuilder, address: ir.Value, count: int) -> ir.Value:
    one = vector_at(builder, address, F32, 1)
    return shuffle(builder, one, one, [0] * count)


def widened(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """A vector of LANES with zeros behind what there is."""
    count = vector.type.count
    if count == LANES:
        return vector
    return shuffle(builder, vector, splat(F32, 0.0, count), [min(i, count) for i in range(LANES)])


def shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def lane_sums(builder: ir.IRBuilder, vectors: Sequence[ir.Value]) -> ir.Value:
    """[n] the sums over the lanes of 1, 2 or 4 vectors: transposed by pairs four lanes at a time, then folded."""
    blocks = range(0, LANES, 4)

    def pair(a: ir.Value, b: ir.Value, first: Sequence[int], second: Sequence[int]) -> ir.Value:
        """The sum of two selections, each of lanes 0-3 of `a` and 4-7 of `b`, the same in every four lanes."""
        chosen = [
            shuffle(builder, a, b, [at + i if i < 4 else LANES + at + i - 4 for at in blocks for i in lanes])
            for lanes in (first, second)
        ]
        return builder.fadd(*chosen)

    paired = list(vectors)
    if len(paired) > 1:
        paired = [pair(a, b, (0, 4, 1, 5), (2, 6, 3, 7)) for a, b in cut(paired, 2)]
    if len(paired) > 1:
        paired = [pair(a, b, (0, 1, 4, 5), (2, 3, 6, 7)) for a, b in cut(paired, 2)]
    (total,) = paired
    while total.type.count > len(vectors):
        half = total.type.count // 2
        total = builder.fadd(
            shuffle(builder, total, total, range(half)), shuffle(builder, total, total, range(half, 2 * half))
        )
    return total


def exp_negative(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x of a float or a vector of them, x <= 0, to 2 ulp; 0 below -87, and what is no number stays so."""
    vector = x.type != F32
    words = ir.VectorType(I32, x.type.count) if vector else I32

    def constant(value: float, to: ir.Type = x.type) -> ir.Constant:
        return ir.Constant(to, [value] * x.type.count if vector else value)

    tiny = builder.fcmp_ordered("<", x, constant(-87.0))
    clamped = builder.select(tiny, constant(-87.0), x)
    name = f"llvm.rint.v{x.type.count}f32" if vector else "llvm.rint.f32"
    rint = cgutils.get_or_insert_function(builder.module, ir.FunctionType(x.type, [x.type]), name)
    power = builder.call(rint, [builder.fmul(clamped, constant(1.4426950408889634))])
    # ln 2 in two parts (Cody and Waite), then the Taylor series on [-ln 2 / 2, ln 2 / 2].
    r = multiply_add(builder, power, constant(-0.693359375), clamped)
    r = multiply_add(builder, power, constant(2.12194440e-4), r)
    series = constant(1 / 5040)
    for term in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        series = multiply_add(builder, series, r, constant(term))
    # The lowest bits of a float beside 1.5 * 2^23 are an integer, defined even where the power is no number.
    integer = builder.bitcast(builder.fadd(power, constant(12582912.0)), words)
    bits = builder.add(builder.shl(integer, constant(23, words)), constant(127 << 23, words))
    return builder.select(tiny, constant(0.0), builder.fmul(series, builder.bitcast(bits, x.type)))
