"""Loops that do nothing but multiply and add in registers, or read memory: what the machine can do at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

ACCUMULATORS = 12
"""Independent sums per thread. Two fused multiply-adds start per cycle and take four or five, so ten are needed; with
two operands twelve still fit into the sixteen registers of AVX2."""

_UNROLL = 4


def fma_loop(lanes: int) -> Callable[[int], float]:
    """A compiled loop of `fma_flops(lanes, n)` operations in vectors of `lanes` floats; it runs without the GIL.

    Written as LLVM vectors, because a compiler that vectorizes a scalar loop keeps as many sums as it sees fit (and
    reached 60 % of this).
    """

    @intrinsic
    def run(typingctx: Any, iterations: Any) -> Any:
        return float32(types.int64), _codegen(lanes)

    @njit(nogil=True)
    def loop(iterations: int) -> float:
        return run(iterations)

    return loop


def fma_flops(lanes: int, iterations: int) -> int:
    """Operations of one call of `fma_loop(lanes)`, two for each multiply-add."""
    return 2 * lanes * ACCUMULATORS * _UNROLL * iterations


def _codegen(lanes: int) -> Callable[..., Any]:
    vector, word = ir.VectorType(ir.FloatType(), lanes), ir.IntType(64)

    def constant(value: float) -> ir.Constant:
        return ir.Constant(vector, [value] * lanes)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fma_type = ir.FunctionType(vector, [vector] * 3)
        fma = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{lanes}f32")
        entry = builder.block
        loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        count = builder.phi(word)
        count.add_incoming(ir.Constant(word, 0), entry)
        phis = [builder.phi(vector) for _ in range(ACCUMULATORS)]
        # x <- 0.999 x + 0.001 stays a normal number for ever; twelve different starts cannot be folded into one.
        for i, phi in enumerate(phis):
            phi.add_incoming(constant(float(i + 2)), entry)
        sums = list(phis)
        for _ in range(_UNROLL):
            sums = [builder.call(fma, [x, constant(0.999), constant(0.001)]) for x in sums]
        for phi, x in zip(phis, sums, strict=True):
            phi.add_incoming(x, loop)
        following = builder.add(count, ir.Constant(word, 1))
        count.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, args[0]), loop, done)
        builder.position_at_end(done)
        total = sums[0]
        for x in sums[1:]:
            total = builder.fadd(total, x)
        lane = [builder.extract_element(total, ir.Constant(ir.IntType(32), i)) for i in range(lanes)]
        result = lane[0]
        for x in lane[1:]:
            result = builder.fadd(result, x)
        return result

    return codegen


# Not `fastmath=True`: with all of its flags this loop is not vectorized, and a sixth as fast.
@njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})
def read_floats(values: np.ndarray) -> float:
    """The sum of `values`: memory is read once and nothing is written."""
    total = np.float32(0.0)
    for i in range(values.shape[0]):
        total += values[i]
    return float(total)
