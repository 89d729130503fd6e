"""Vectors to codes and back inside Triton kernels, bit for bit what the codecs compute.

Every rounding is written out in integers or as an addition that rounds: compilers and the interpreter differ in their
casts to bf16 and fp8, and sm_80 has no e4m3. Kernels that encode are launched without fused multiply-add.
"""

# Shape legend: R rows (tokens), D head dim padded to a power of two, E elements of an int4 group.
from __future__ import annotations

import triton
import triton.language as tl

from longctx.quant.codec import LEAST_SCALE
from longctx.quant.int4 import GROUP

_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_GROUP = tl.constexpr(GROUP)
_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: added and taken away again it rounds to the nearest integer, halves to even, up to 2^22."""


@triton.jit
def bf16_bits(x):
    """fp32 to the bits of the nearest bf16, int16."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def bf16_from_bits(bits):
    """int16 bits of bf16 to fp32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _bf16_towards(x, UP: tl.constexpr):
    """The nearest bf16 not below (UP) or not above `x`, as fp32; beyond the last one infinite. NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    short = bits & -65536
    away = (bits >= 0) if UP else (bits < 0)
    moved = tl.where(away & (short != bits), short + 65536, short)
    return tl.where(x != x, x, moved.to(tl.float32, bitcast=True))


@triton.jit
def load_float(ptr, mask, KIND: tl.constexpr):
    """fp32 values of what is stored exactly; bf16 comes as int16 bits. Masked ones are 0 and not read."""
    if KIND == "bf16":
        return bf16_from_bits(tl.load(ptr, mask, other=0))
    else:
        return tl.load(ptr, mask, other=0.0).to(tl.float32)


@triton.jit
def cast_float(x, KIND: tl.constexpr):
    """fp32 rounded to "fp32", "bf16" (as int16 bits) or "fp16"."""
    if KIND == "bf16":
        return bf16_bits(x)
    elif KIND == "fp16":
        return x.to(tl.float16)
    else:
        return x


@triton.jit
def encode_exact(x, KIND: tl.constexpr):
    """fp32 to what an exact format stores: fp16 ends at its largest value, the others are casts."""
    if KIND == "fp16":
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return cast_float(x, KIND)


@triton.jit
def _is_finite(x):
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def encode_symmetric(x, KIND: tl.constexpr):
    """Codes [R, D] (int8, or fp8's bits as uint8) and scales [R] of fp32 `x` [R, D] for int8 and both fp8 formats."""
    largest: tl.constexpr = 127.0 if KIND == "int8" else (448.0 if KIND == "fp8_e4m3" else 57344.0)
    finite = tl.min(_is_finite(x).to(tl.int32), axis=1) == 1
    top = tl.max(tl.abs(x), axis=1)
    scale = tl.math.div_rn(top, tl.full(top.shape, largest, tl.float32))
    usable = finite & (scale >= _LEAST_SCALE)
    inverse = tl.where(usable, tl.math.div_rn(tl.full(top.shape, 1.0, tl.float32), scale), 0.0)
    scale = tl.where(usable, scale, tl.where(finite, 0.0, float("nan")))
    codes = x * inverse[:, None]
    codes = tl.where(codes != codes, 0.0, codes)
    codes = tl.where(codes > largest, largest, tl.where(codes < -largest, -largest, codes))
    if KIND == "int8":
        return ((codes + _ROUND) - _ROUND).to(tl.int8), scale
    else:
        return _fp8_bits(codes, KIND), scale


@triton.jit
def _fp8_bits(x, KIND: tl.constexpr):
    """fp32 within the format's range to the bits of the nearest fp8, uint8, halves to even.

    Below the smallest normal number an addition to a number with that spacing rounds; above, integer arithmetic on the
    bits does, and its carry into the exponent is the right one.
    """
    shift: tl.constexpr = 20 if KIND == "fp8_e4m3" else 21
    bias: tl.constexpr = 120 if KIND == "fp8_e4m3" else 112  # 127 less the format's
    spacing: tl.constexpr = 16384.0 if KIND == "fp8_e4m3" else 128.0
    normal: tl.constexpr = 0.015625 if KIND == "fp8_e4m3" else 0.00006103515625
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    large = (size + ((1 << (shift - 1)) - 1) + ((size >> shift) & 1) - (bias << 23)) >> shift
    small = (tl.abs(x) + spacing).to(tl.int32, bitcast=True) & 0xFF
    return (tl.where(tl.abs(x) < normal, small, large) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def fp8_from_bits(bits, KIND: tl.constexpr):
    """The bits of fp8, uint8, to fp32: exponent and mantissa moved into place, then the bias multiplied away."""
    shift: tl.constexpr = 20 if KIND == "fp8_e4m3" else 21
    factor: tl.constexpr = 1.329227995784916e36 if KIND == "fp8_e4m3" else 5.192296858534828e33  # 2^120, 2^112
    wide = bits.to(tl.int32)
    # The sign too: in some versions a minus is a subtraction from 0, which gives 0.0 for 0.0.
    return (((wide & 0x7F) << shift) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True) * factor


@triton.jit
def encode_int4_group(low_half, high_half, mask):
    """Bytes [R, E/2], and step and lowest value [R] as fp32, of one group: its elements' halves, fp32 [R, E/2].

    Only elements under `mask` count.
    """
    finite = tl.where(mask, (_is_finite(low_half) & _is_finite(high_half)).to(tl.int32), 1)
    finite = tl.min(finite, axis=1) == 1
    bottom = tl.min(tl.where(mask, tl.minimum(low_half, high_half), float("inf")), axis=1) + 0.0
    top = tl.max(tl.where(mask, tl.maximum(low_half, high_half), float("-inf")), axis=1) + 0.0
    low = _bf16_towards(bottom, False)
    step = _bf16_towards(tl.math.div_rn(top - low, tl.full(top.shape, 15.0, tl.float32)), True)
    finite = finite & _is_finite(step) & _is_finite(low)
    inverse = tl.math.div_rn(tl.full(step.shape, 1.0, tl.float32), tl.where(step > 0, step, 1.0))
    inverse = tl.where(finite & (step > 0) & _is_finite(inverse), inverse, 0.0)
    codes = _int4_codes(low_half, low, inverse) | (_int4_codes(high_half, low, inverse) << 4)
    return codes.to(tl.uint8), tl.where(finite, step, float("nan")), tl.where(finite, low, float("nan"))


@triton.jit
def _int4_codes(x, low, inverse):
    codes = (x - low[:, None]) * inverse[:, None]
    codes = tl.where(codes > 0.0, tl.where(codes < 15.0, codes, 15.0), 0.0)  # NaN too is 0
    return ((codes + _ROUND) - _ROUND).to(tl.int32)
