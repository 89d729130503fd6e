"""What compiled kernels share: memory at addresses, an atomic counter, floats of bits, an exponential."""

from __future__ import annotations

from llvmlite import ir
from numba import float32, int32, int64, types
from numba.extending import intrinsic

from longctx.attention.kernels import vectors_numba


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


@intrinsic
def exp_negative(typingctx, x):
    """e^x for x <= 0; a loop over it is vectorized, as one over the C library's would not be."""

    def codegen(context, builder, signature, args):
        return vectors_numba.exp_negative(builder, args[0])

    return float32(float32), codegen
