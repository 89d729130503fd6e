"""Every way in which the Triton attention kernels are launched, as data for compiling them ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from longctx.attention.kernels.decode_triton import decode_kernel, merge_splits_kernel
from longctx.attention.kernels.prefill_triton import prefill_kernel
from longctx.attention.kernels.triton_launch import KINDS, MERGE_ITEMS, OPTIONS, padded, products
from longctx.attention.kernels.triton_table import decode_tile, prefill_tile
from longctx.quant.formats import FORMATS
from longctx.quant.kernel_variant import KernelVariant

HEAD_DIMS = (64, 80, 96, 128, 256)
PAGE = 256

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "u8",
    torch.float8_e5m2: "u8",
}
_OF_DTYPE = {"fp32": torch.float32, "fp16": torch.float16}


def variants(arch: int) -> list[KernelVariant]:
    """All of them for `arch` (80, 90, 100): formats and head dims, each with the queries' dtype that goes with it.

    A group of up to 16 query heads is one variant: it is padded to 16.
    """
    found = []
    for dim in HEAD_DIMS:
        found.append(_merge(dim))
        for fmt in FORMATS:
            compute = _OF_DTYPE.get(fmt, torch.bfloat16)
            for softcap in (False, True) if fmt == "bf16" else (False,):
                found += [_decode(arch, dim, fmt, compute, softcap), _prefill(arch, dim, fmt, compute, softcap)]
    return found


def _decode(arch: int, dim: int, fmt: str, compute: torch.dtype, softcap: bool) -> KernelVariant:
    tile = decode_tile(arch, compute, FORMATS[fmt].lossy, padded(dim))
    constants = _constants(dim, fmt, compute, softcap)
    constants |= {"GROUP": 4, "GROUP_PAD": 16, "SPLIT": tile.split, "BLOCK_N": tile.block_n}
    pointers = {"tables": "*i64", "positions": "*i64", "item_row": "*i64", "item_split": "*i64"}
    pointers |= dict.fromkeys(("out", "tops", "totals"), "*fp32")
    name = f"decode {fmt} {dim}{' softcap' if softcap else ''}"
    return _variant(name, decode_kernel, pointers, fmt, compute, constants, tile.num_warps, tile.num_stages)


def _prefill(arch: int, dim: int, fmt: str, compute: torch.dtype, softcap: bool) -> KernelVariant:
    tile = prefill_tile(arch, compute, FORMATS[fmt].lossy, padded(dim))
    constants = _constants(dim, fmt, compute, softcap)
    constants |= {"GROUP": 4, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    pointers = {"table": "*i64", "out": "*fp32", "lse": "*fp32"}
    name = f"prefill {fmt} {dim}{' softcap' if softcap else ''}"
    return _variant(name, prefill_kernel, pointers, fmt, compute, constants, tile.num_warps, tile.num_stages)


def _merge(dim: int) -> KernelVariant:
    names = ("partial", "tops", "totals", "out", "lse")
    signature = dict.fromkeys(names, "*fp32") | {"row_items": "*i64"}
    constants = {"V_DIM": dim, "V_PAD": padded(dim), "BLOCK_I": MERGE_ITEMS}
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in merge_splits_kernel.arg_names}
    return KernelVariant(f"merge splits {dim}", merge_splits_kernel, signature, constants, options=OPTIONS)


def _constants(dim: int, fmt: str, compute: torch.dtype, softcap: bool) -> dict[str, Any]:
    kind, pad = KINDS[fmt], padded(dim)
    return {
        "K_KIND": kind,
        "V_KIND": kind,
        "K_DIM": dim,
        "V_DIM": dim,
        "K_PAD": pad,
        "V_PAD": pad,
        "PAGE": PAGE,
        "SOFTCAP": softcap,
        **products(compute, pad),
    }


def _variant(
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    fmt: str,
    compute: torch.dtype,
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
) -> KernelVariant:
    stored = FORMATS[fmt]
    signature = {"q": f"*{_TYPES[compute]}", **pointers}
    signature |= dict.fromkeys(("k", "v"), f"*{_TYPES[stored.torch_dtype]}")
    scales = ("k_scale", "v_scale")
    if stored.scales:
        signature |= dict.fromkeys(scales, f"*{_TYPES[stored.scale_dtype]}")
    else:
        constants |= dict.fromkeys(scales, None)
    signature |= dict.fromkeys(constants, "constexpr")
    signature |= {"score_scale": "fp32", "cap": "fp32"}
    strides = tuple(_strides(kernel.arg_names))
    signature |= dict.fromkeys(strides, "i64")
    # Whatever is left is a count or a position.
    signature = {name: signature.get(name, "i32") for name in kernel.arg_names}
    return KernelVariant(name, kernel, signature, constants, num_warps, num_stages, strides, OPTIONS)


def _strides(names: list[str]) -> Iterator[str]:
    return (name for name in names if name.endswith("_stride"))
