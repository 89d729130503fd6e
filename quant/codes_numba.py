"""The codecs of int8, fp8 and int4 for one vector, compiled: the same bits as the reference arithmetic's."""

# Shape legend: D head dim, E elements of one group, C scales of a vector.
#
# Nothing here may be fast math: rounding to even, NaN and the order of operations are part of the format. The largest
# magnitude is searched among the bits, where NaN stands above infinity and every other number in its order.
from __future__ import annotations

import numpy as np
import torch
from numba import float32, int8, int16, int32, njit, uint8

from longctx.quant.codec import LEAST_SCALE
from longctx.quant.formats import FORMATS
from longctx.quant.int4 import GROUP
from longctx.quant.memory_numba import bits_of_float, byte_at, float_at, float_of_bits, int16_at, nearest

INT8, E4M3, E5M2, INT4 = 0, 1, 2, 3
CODED = {"int8": INT8, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2, "int4": INT4}
"""The formats that are computed here, and the numbers by which compiled code knows them."""

_INFINITE, _MAGNITUDE = int32(0x7F800000), int32(0x7FFFFFFF)
_NAN, _NAN_BF16 = np.float32(np.nan), np.int16(0x7FC0)
_LEAST, _FIFTEEN = np.float32(LEAST_SCALE), np.float32(15.0)

_inlined = njit(inline="always", nogil=True)


def largest_code(name: str) -> float:
    """What the largest element of a vector is stored as, in a format with one scale per vector."""
    return 127.0 if name == "int8" else float(torch.finfo(FORMATS[name].torch_dtype).max)


def decoded_bytes(name: str) -> np.ndarray:
    """What each of the 256 codes of an fp8 format is, [256] fp32."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FORMATS[name].torch_dtype)
    return codes.float().numpy()


@_inlined
def vector_bytes(D, FORMAT):
    """Bytes of one vector's codes and of its scales."""
    if FORMAT == INT4:
        return D // 2, (D + GROUP - 1) // GROUP * 4
    return D, 4


@_inlined
def encode_vector(x, data, scales, LARGEST, D, FORMAT):
    """Store x [D] as bytes at `data` and scales at `scales` (addresses)."""
    if FORMAT == INT4:
        for begin in range(0, D, GROUP):
            _encode_group(x, begin, min(GROUP, D - begin), data + begin // 2, scales + 4 * (begin // GROUP))
    else:
        _encode_whole(x, byte_at(data), float_at(scales), LARGEST, D, FORMAT)


@_inlined
def decode_vector(data, scales, table, out, D, FORMAT):
    """Read what `encode_vector` stored into out [D]; `table` has what each fp8 code is."""
    if FORMAT == INT4:
        for begin in range(0, D, GROUP):
            _decode_group(byte_at(data + begin // 2), int16_at(scales + 4 * (begin // GROUP)), begin, D, out)
    elif FORMAT == INT8:
        codes, scale = byte_at(data), float_at(scales)[0]
        for d in range(D):
            out[d] = float32(int8(codes[d])) * scale
    else:
        codes, scale = byte_at(data), float_at(scales)[0]
        for d in range(D):
            out[d] = table[codes[d]] * scale


@_inlined
def _encode_whole(x, data, scales, LARGEST, D, FORMAT):
    top_bits = int32(0)
    for d in range(D):
        top_bits = max(top_bits, bits_of_float(x[d]) & _MAGNITUDE)
    top = float_of_bits(top_bits)
    scale = top / LARGEST
    inverse = float32(0.0)
    if top_bits >= _INFINITE:
        scale = _NAN
    elif scale >= _LEAST:
        inverse = float32(1.0) / scale
    else:
        scale = float32(0.0)
    scales[0] = scale
    if inverse == 0:
        # Not 0 * x: of what is not finite that would be NaN, and of -1.0 it would be -0.0, another code in fp8.
        _encode_nothing(x, data, D, FORMAT)
        return
    for d in range(D):
        code = min(max(x[d] * inverse, -LARGEST), LARGEST)
        if FORMAT == INT8:
            data[d] = uint8(int32(nearest(code)) & int32(255))
        elif FORMAT == E4M3:
            data[d] = _fp8_bits(code, 7, 3)
        else:
            data[d] = _fp8_bits(code, 15, 2)


@_inlined
def _encode_nothing(x, data, D, FORMAT):
    """The codes of x * 0.0: zeros, with their signs where the format has signed zeros; 0 for what is not finite."""
    for d in range(D):
        bits = bits_of_float(x[d])
        finite = bits & _MAGNITUDE < _INFINITE
        data[d] = uint8((bits >> 24) & int32(0x80)) if finite and FORMAT != INT8 else uint8(0)


@_inlined
def _fp8_bits(x, BIAS, MANTISSA):
    """The byte of the nearest value of a format with that exponent bias and mantissa, halves to even."""
    bits = bits_of_float(x)
    magnitude = bits & _MAGNITUDE
    shift = int32(23 - MANTISSA)
    half = (int32(1) << (shift - int32(1))) - int32(1)
    normal = ((magnitude + half + ((magnitude >> shift) & int32(1))) >> shift) - int32((127 - BIAS) << MANTISSA)
    # Below the smallest normal number codes are multiples of one step, 2^(1 - BIAS - MANTISSA).
    tiny = int32(nearest(float_of_bits(magnitude) * float32(2.0 ** (BIAS - 1 + MANTISSA))))
    code = tiny if magnitude < int32((127 - BIAS + 1) << 23) else normal
    return uint8(code | ((bits >> int32(24)) & int32(0x80)))


@_inlined
def _encode_group(x, begin, E, data_at, scales_at):
    """One int4 group: x [begin, begin + E) to E / 2 bytes and [step, low] in bf16."""
    bottom_key, top_key, top_bits = int32(0x7FFFFFFF), int32(-0x80000000), int32(0)
    for d in range(begin, begin + E):
        bits = bits_of_float(x[d])
        key = bits ^ ((bits >> int32(31)) & _MAGNITUDE)  # integers in the order of the floats
        bottom_key, top_key = min(bottom_key, key), max(top_key, key)
        top_bits = max(top_bits, bits & _MAGNITUDE)
    bottom = float_of_bits(bottom_key ^ ((bottom_key >> int32(31)) & _MAGNITUDE)) + float32(0.0)
    top = float_of_bits(top_key ^ ((top_key >> int32(31)) & _MAGNITUDE)) + float32(0.0)
    low = _bf16_down(bottom)
    step = -_bf16_down(-((top - low) / _FIFTEEN))
    data, scales, half = byte_at(data_at), int16_at(scales_at), E // 2
    finite = (
        top_bits < _INFINITE
        and bits_of_float(step) & _MAGNITUDE < _INFINITE
        and bits_of_float(low) & _MAGNITUDE < _INFINITE
    )
    scales[0] = int16(bits_of_float(step) >> int32(16)) if finite else _NAN_BF16
    scales[1] = int16(bits_of_float(low) >> int32(16)) if finite else _NAN_BF16
    inverse = float32(1.0) / step if finite and step > 0 else float32(0.0)
    if inverse == 0 or bits_of_float(inverse) >= _INFINITE:
        for i in range(half):
            data[i] = uint8(0)
        return
    for i in range(half):
        first, second = (x[begin + i] - low) * inverse, (x[begin + half + i] - low) * inverse
        first = min(max(nearest(first), float32(0.0)), _FIFTEEN)
        second = min(max(nearest(second), float32(0.0)), _FIFTEEN)
        data[i] = uint8(int32(first) | (int32(second) << int32(4)))


@_inlined
def _decode_group(codes, scales, begin, D, out):
    E = min(GROUP, D - begin)
    half = E // 2
    step, low = _of_bf16(scales[0]), _of_bf16(scales[1])
    for i in range(half):
        out[begin + i] = float32(codes[i] & uint8(15)) * step + low
        out[begin + half + i] = float32(codes[i] >> uint8(4)) * step + low


@_inlined
def _of_bf16(word):
    return float_of_bits(int32(word) << int32(16))


@_inlined
def _bf16_down(x):
    """The nearest value not above `x` that bf16 can hold: its upper bits, one more of magnitude where x is below."""
    bits = bits_of_float(x)
    lost = bits & int32(0xFFFF)
    return float_of_bits((bits - lost) + (int32(0x10000) if bits < 0 and lost != 0 else int32(0)))
