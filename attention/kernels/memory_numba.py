"""What compiled kernels share: memory at addresses, an atomic counter, and an exponential that is vectorized."""

from __future__ import annotations

import math

from llvmlite import ir
from numba import float32, int32, int64, njit, types
from numba.extending import intrinsic


def address_intrinsic(element: types.Type, ir_type: ir.Type):
    """A function for compiled code that takes an address for an array of such elements."""

    @intrinsic
    def at(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], ir_type.as_pointer())

        return types.CPointer(element)(types.int64), codegen

    return at


float_at = address_intrinsic(float32, ir.FloatType())
int_at = address_intrinsic(int64, ir.IntType(64))


@intrinsic
def fetch_add(typingctx, address, value):
    """Atomically add to the int64 at `address`; returns what was there."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return int64(int64, int64), codegen


@intrinsic
def float_of_bits(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return float32(int32), codegen


@njit(inline="always", fastmath={"reassoc", "contract", "arcp", "nsz"}, nogil=True)
def exp_negative(x):
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
    result = series * float_of_bits((int32(power) + int32(127)) << int32(23))
    return result if x > float32(-87.0) else float32(0.0)
