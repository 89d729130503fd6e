"""What compiled kernels share: memory at addresses, an atomic counter, floats and their bits, a name in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, float32, from_dtype, int16, int32, int64, types, uint8
from numba.core import cgutils
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
int16_at = address_intrinsic(int16, ir.IntType(16))
byte_at = address_intrinsic(uint8, ir.IntType(8))


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
def bits_of_float(typingctx, x):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return int32(float32), codegen


@intrinsic
def nearest(typingctx, x):
    """The nearest whole number, halves to even, as an instruction that is vectorized."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.f32"), [args[0]])

    return float32(float32), codegen


def compile_kernel(
    kernel: Callable[[Any], None],
    name: str,
    args: np.dtype,
    modules: Sequence[ModuleType],
    fastmath: bool | set[str] = False,
) -> Any:
    """Compile a C function of the address of one `args` record, or find it in the cache of compiled code.

    numba knows a cached function by its own file and its qualified name: that is made of `name` and of a digest of
    `modules`, the other files that its code comes from.
    """
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in modules) + Path(__file__).read_bytes()
    kernel.__qualname__ = f"{name}_{blake2b(code, digest_size=6).hexdigest()}"
    signature = types.void(types.CPointer(from_dtype(args)))
    return cfunc(signature, nopython=True, cache=True, fastmath=fastmath)(kernel)
