"""Stores and gathers keys and values on a GPU: every format's codes computed and written in one launch."""

# Shape legend: T new tokens, S gathered tokens, K kv heads, B block tokens, D head dim, C scales of a vector.
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from longctx.quant.bits_triton import (
    bf16_bits,
    bf16_from_bits,
    cast_float,
    encode_exact,
    encode_int4_group,
    encode_symmetric,
    fp8_from_bits,
    load_float,
)
from longctx.quant.formats import FORMATS, KVFormat
from longctx.quant.int4 import GROUP
from longctx.quant.kernel_variant import KernelVariant
from longctx.quant.layout import LayerKV
from longctx.quant.store import StoreKernels, use_kernels

TILE = 16
"""Rows of one program."""

OPTIONS = {"enable_fp_fusion": False}
"""A fused multiply-add would round once where the codec rounds twice."""

_GROUP = tl.constexpr(GROUP)
_KIND_OF_DTYPE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_POINTERS = {"fp32": "*fp32", "bf16": "*i16", "fp16": "*fp16", "int8": "*i8"}


@triton.jit
def _store_vectors(
    x_ptr, data_ptr, scale_ptr, at, scale_at, x_at, live, IN: tl.constexpr, KIND: tl.constexpr, DIM: tl.constexpr
):
    """Encode the vectors [R, DIM] at `x_at` and write them at `at`, their scales at `scale_at`; all offsets [R]."""
    if KIND == "int4":
        i = tl.arange(0, _GROUP // 2)
        for group in tl.static_range((DIM + _GROUP - 1) // _GROUP):
            half = tl.minimum(_GROUP, DIM - group * _GROUP) // 2
            mask = live[:, None] & (i < half)[None, :]
            low_ptr = x_ptr + x_at[:, None] + (i + group * _GROUP)[None, :]
            low_half, high_half = load_float(low_ptr, mask, IN), load_float(low_ptr + half, mask, IN)
            codes, step, low = encode_int4_group(low_half, high_half, mask)
            tl.store(data_ptr + at[:, None] + (i + group * _GROUP // 2)[None, :], codes, mask)
            tl.store(scale_ptr + scale_at + 2 * group, bf16_bits(step), live)
            tl.store(scale_ptr + scale_at + 2 * group + 1, bf16_bits(low), live)
    else:
        i = tl.arange(0, triton.next_power_of_2(DIM))
        mask = live[:, None] & (i < DIM)[None, :]
        x = load_float(x_ptr + x_at[:, None] + i[None, :], mask, IN)
        target = data_ptr + at[:, None] + i[None, :]
        if KIND == "fp32" or KIND == "bf16" or KIND == "fp16":
            tl.store(target, encode_exact(x, KIND), mask)
        else:
            codes, scale = encode_symmetric(x, KIND)
            tl.store(target, codes, mask)
            tl.store(scale_ptr + scale_at, scale, live)


@triton.jit
def _decode_vectors(data_ptr, scale_ptr, at, scale_at, live, KIND: tl.constexpr, DIM: tl.constexpr):
    """Vectors fp32 [R, D] stored at the offsets `at` [R]; what is not live is 0 and not read."""
    i = tl.arange(0, triton.next_power_of_2(DIM))
    mask = live[:, None] & (i < DIM)[None, :]
    if KIND == "int4":
        group = i // _GROUP
        half = tl.minimum(_GROUP, DIM - group * _GROUP) // 2
        inside = i - group * _GROUP
        byte = group * (_GROUP // 2) + tl.where(inside < half, inside, inside - half)
        packed = tl.load(data_ptr + at[:, None] + byte[None, :], mask, other=0).to(tl.int32)
        codes = tl.where((inside < half)[None, :], packed & 15, packed >> 4).to(tl.float32)
        step_ptr = scale_ptr + scale_at[:, None] + (2 * group)[None, :]
        step = bf16_from_bits(tl.load(step_ptr, mask, other=0))
        return codes * step + bf16_from_bits(tl.load(step_ptr + 1, mask, other=0))
    elif KIND == "fp32" or KIND == "bf16" or KIND == "fp16":
        return load_float(data_ptr + at[:, None] + i[None, :], mask, KIND)
    else:
        codes = tl.load(data_ptr + at[:, None] + i[None, :], mask, other=0)
        scale = tl.load(scale_ptr + scale_at, live, other=0.0)
        values = codes.to(tl.float32) if KIND == "int8" else fp8_from_bits(codes, KIND)
        return values * scale[:, None]


@triton.jit
def _gather_vectors(
    data_ptr, scale_ptr, at, scale_at, live, out_ptr, out_at, wanted, KIND: tl.constexpr, OUT: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    x = _decode_vectors(data_ptr, scale_ptr, at, scale_at, live, KIND, DIM)
    i = tl.arange(0, triton.next_power_of_2(DIM))
    tl.store(out_ptr + out_at[:, None] + i[None, :], cast_float(x, OUT), wanted[:, None] & (i < DIM)[None, :])


@triton.jit
def _store_kernel(
    k_ptr,
    v_ptr,
    k_data,
    v_data,
    k_scale,
    v_scale,
    slots_ptr,
    rows_ptr,
    num_tokens,
    block_tokens,
    k_head_stride,
    k_token_stride,
    v_head_stride,
    v_token_stride,
    k_slot_stride,
    v_slot_stride,
    k_scale_slot_stride,
    v_scale_slot_stride,
    IN: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid [token tiles, K, 2]: keys by the last index 0, values by 1."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    live = token < num_tokens
    slot = tl.load(slots_ptr + token, live, other=0)
    row = head * block_tokens + tl.load(rows_ptr + token, live, other=0)
    if tl.program_id(2) == 0:
        at = slot * k_slot_stride + row * K_WIDTH
        scale_at = slot * k_scale_slot_stride + row * K_SCALES
        x_at = head * k_head_stride + token * k_token_stride
        _store_vectors(k_ptr, k_data, k_scale, at, scale_at, x_at, live, IN, K_KIND, K_DIM)
    else:
        at = slot * v_slot_stride + row * V_WIDTH
        scale_at = slot * v_scale_slot_stride + row * V_SCALES
        x_at = head * v_head_stride + token * v_token_stride
        _store_vectors(v_ptr, v_data, v_scale, at, scale_at, x_at, live, IN, V_KIND, V_DIM)


@triton.jit
def _gather_kernel(
    k_data,
    v_data,
    k_scale,
    v_scale,
    table_ptr,
    k_out,
    v_out,
    start,
    length,
    total,
    block_tokens,
    k_slot_stride,
    v_slot_stride,
    k_scale_slot_stride,
    v_scale_slot_stride,
    k_head_stride,
    k_token_stride,
    v_head_stride,
    v_token_stride,
    OUT: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid [tiles of `total` positions, K, 2]; positions past `length` and those of the null block become zeros."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    position = start + token
    slot = tl.load(table_ptr + position // block_tokens, token < length, other=0)
    row = head * block_tokens + position % block_tokens
    live = slot > 0
    if tl.program_id(2) == 0:
        at, scale_at = slot * k_slot_stride + row * K_WIDTH, slot * k_scale_slot_stride + row * K_SCALES
        out_at = head * k_head_stride + token * k_token_stride
        _gather_vectors(k_data, k_scale, at, scale_at, live, k_out, out_at, token < total, K_KIND, OUT, K_DIM)
    else:
        at, scale_at = slot * v_slot_stride + row * V_WIDTH, slot * v_scale_slot_stride + row * V_SCALES
        out_at = head * v_head_stride + token * v_token_stride
        _gather_vectors(v_data, v_scale, at, scale_at, live, v_out, out_at, token < total, V_KIND, OUT, V_DIM)


def store_tokens(
    layer: LayerKV,
    slots_T: np.ndarray | torch.Tensor,
    rows_T: np.ndarray | torch.Tensor,
    k_KTD: torch.Tensor,
    v_KTD: torch.Tensor,
) -> None:
    """`quant.store.store_tokens` in one launch, to the same bytes."""
    num_tokens = k_KTD.shape[1]
    if num_tokens == 0:
        return
    device = layer.k.device
    slots, rows = (torch.as_tensor(x, dtype=torch.int64, device=device).contiguous() for x in (slots_T, rows_T))
    kind = _KIND_OF_DTYPE[k_KTD.dtype]
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k_KTD, v_KTD.to(k_KTD.dtype)))
    _store_kernel[(triton.cdiv(num_tokens, TILE), k.shape[0], 2)](
        _bits(k),
        _bits(v),
        *_stored(layer),
        slots,
        rows,
        num_tokens,
        layer.block_tokens,
        *k.stride()[:2],
        *v.stride()[:2],
        *_slot_strides(layer),
        IN=kind,
        **_constants(layer),
        **OPTIONS,
    )


def gather_tokens(
    layer: LayerKV, table: np.ndarray | torch.Tensor, start: int, length: int, out: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Positions [start, start + length) decoded into `out`, two [K, S, D] of one dtype whose further rows become 0."""
    k_out, v_out = out
    total = k_out.shape[1]
    assert k_out.stride(2) == v_out.stride(2) == 1 and k_out.dtype == v_out.dtype and v_out.shape[1] == total
    if total == 0:
        return
    _gather_kernel[(triton.cdiv(total, TILE), k_out.shape[0], 2)](
        *_stored(layer),
        torch.as_tensor(table, dtype=torch.int64, device=layer.k.device).contiguous(),
        _bits(k_out),
        _bits(v_out),
        start,
        length,
        total,
        layer.block_tokens,
        *_slot_strides(layer),
        *k_out.stride()[:2],
        *v_out.stride()[:2],
        OUT=_KIND_OF_DTYPE[k_out.dtype],
        **_constants(layer),
        **OPTIONS,
    )


KERNELS = StoreKernels(store_tokens, gather_tokens)


def install(device_type: str = "cuda") -> None:
    """Let `quant.store` use these kernels; on "cpu" only Triton's interpreter can run them."""
    use_kernels(device_type, KERNELS)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """A view that kernels can take anywhere: bf16 and fp8 as integers of their size."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16)
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.dtype.is_floating_point else x


def _stored(layer: LayerKV) -> tuple[torch.Tensor, ...]:
    """K and V data and scales as kernels take them; where there are no scales, the data stand in and are not used."""
    k_scale, v_scale = (x if x is not None else y for x, y in ((layer.k_scale, layer.k), (layer.v_scale, layer.v)))
    parts = (layer.k, layer.v, k_scale, v_scale)
    for part in parts:
        assert part.stride()[1:] == (part.shape[2] * part.shape[3], part.shape[3], 1), "rows of a slot are contiguous"
    return tuple(_bits(part) for part in parts)


def _slot_strides(layer: LayerKV) -> tuple[int, ...]:
    k_scale, v_scale = (0 if x is None else x.stride(0) for x in (layer.k_scale, layer.v_scale))
    return layer.k.stride(0), layer.v.stride(0), k_scale, v_scale


def _constants(layer: LayerKV) -> dict[str, int | str]:
    return format_constants(layer.k_format, layer.v_format, layer.k_dim, layer.v_dim)


def format_constants(k_format: KVFormat, v_format: KVFormat, k_dim: int, v_dim: int) -> dict[str, int | str]:
    """The constants that both kernels are compiled for."""
    return {
        "K_KIND": k_format.name,
        "V_KIND": v_format.name,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "K_WIDTH": k_format.stored_dim(k_dim),
        "V_WIDTH": v_format.stored_dim(v_dim),
        "K_SCALES": k_format.num_scales(k_dim),
        "V_SCALES": v_format.num_scales(v_dim),
        "ROWS": TILE,
    }


def variants(arch: int) -> list[KernelVariant]:
    """Every format from and to bf16 at all padded head dims and a ragged one; from fp32 and fp16; and mixtures."""
    del arch  # nothing here depends on it
    cases = [("bf16", fmt, fmt, dim, dim) for fmt in FORMATS for dim in (64, 80, 128, 256)]
    cases += [(kind, fmt, fmt, 128, 128) for kind in ("fp32", "fp16") for fmt in (kind, "fp8_e4m3", "int8", "int4")]
    cases += [("bf16", "fp8_e4m3", "int4", 128, 128), ("bf16", "bf16", "int8", 192, 128)]
    return [variant for case in cases for variant in _both(*case)]


def _both(kind: str, k_name: str, v_name: str, k_dim: int, v_dim: int) -> list[KernelVariant]:
    """Storing and gathering as the launchers do it."""
    k_format, v_format = FORMATS[k_name], FORMATS[v_name]
    constants = format_constants(k_format, v_format, k_dim, v_dim)
    pools = [_pointer(k_format), _pointer(v_format), _scale_pointer(k_format), _scale_pointer(v_format)]
    x, slot_strides = _POINTERS[kind], ["i64"] * 4
    store = [x, x, *pools, "*i64", "*i64", "i32", "i32", "i64", "i32", "i64", "i32", *slot_strides]
    gather = [*pools, "*i64", x, x, "i32", "i32", "i32", "i32", *slot_strides, "i64", "i32", "i64", "i32"]
    divisible = ("k_slot_stride", "v_slot_stride", "k_scale_slot_stride", "v_scale_slot_stride", "block_tokens")
    found = []
    for name, fn, types, word in (("store", _store_kernel, store, "IN"), ("gather", _gather_kernel, gather, "OUT")):
        names = fn.arg_names
        signature = dict(zip(names, types + ["constexpr"] * (len(names) - len(types)), strict=True))
        found.append(
            KernelVariant(
                f"{name} {k_name}" + (f" {v_name}" if v_name != k_name else ""),
                fn,
                signature,
                {word: kind} | constants,
                divisible=divisible,
                options=OPTIONS,
            )
        )
    return found


def _pointer(fmt: KVFormat) -> str:
    return _POINTERS.get(fmt.name, "*u8")


def _scale_pointer(fmt: KVFormat) -> str:
    if fmt.scales == 0:
        return _pointer(fmt)
    return "*i16" if fmt.scale_dtype == torch.bfloat16 else "*fp32"
