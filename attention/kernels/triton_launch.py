"""From a layer's view to the arguments of the Triton attention kernels, and every variant that they are launched in."""

# Shape legend: N slots, K kv heads, B block tokens, D head dim.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from longctx.attention.kernels import tiles_triton as tiles
from longctx.attention.kernels.triton_table import INTERPRETER
from longctx.quant.layout import LayerKV

KINDS = {
    "fp32": tiles.EXACT,
    "bf16": tiles.EXACT,
    "fp16": tiles.EXACT,
    "fp8_e4m3": tiles.FP8_E4M3,
    "fp8_e5m2": tiles.FP8_E5M2,
    "int8": tiles.INT8,
    "int4": tiles.INT4,
}
"""How the kernels read each format."""

OPTIONS = {"enable_fp_fusion": True}
"""The compiler's options: multiply and add in one, which newer versions must be asked for."""

MERGE_ITEMS = 32
"""Partial states that are merged at a time."""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def arch_of(device: torch.device) -> int:
    """The row of the table of constants: 80, 90 or 100, the newest that is not newer than the device."""
    if interpreted():
        return INTERPRETER
    major, _ = torch.cuda.get_device_capability(device)
    return max(arch for arch in (80, 90, 100) if arch <= max(major, 8) * 10)


def products(dtype: torch.dtype, pad: int) -> dict[str, Any]:
    """How products are computed for queries in `dtype`: in which type, and fp32 how.

    Three TF32 products make one of fp32; their parts of a query of 256 elements would not fit into registers. The
    interpreter's products know no bf16, whose values fp32 holds.
    """
    if dtype == torch.float16:
        return {"COMPUTE": tl.float16, "PRECISION": "ieee"}
    if dtype == torch.bfloat16 and not interpreted():
        return {"COMPUTE": tl.bfloat16, "PRECISION": "ieee"}
    return {"COMPUTE": tl.float32, "PRECISION": "tf32x3" if pad <= 128 else "ieee"}


def padded(size: int) -> int:
    """The power of two, at least 16, that holds `size`: what tiles and matrix products are made of."""
    return max(16, triton.next_power_of_2(size))


def layer_arguments(
    layer: LayerKV,
) -> tuple[tuple[torch.Tensor | None, ...], tuple[int, ...], dict[str, Any]]:
    """(k, v and their scales; slot and head strides of each; constants) of a layer, in the kernels' order."""
    tensors: list[torch.Tensor | None] = []
    strides: list[int] = []
    for x in (layer.k, layer.v, layer.k_scale, layer.v_scale):
        if x is not None:
            assert x.stride(3) == 1 and x.stride(2) == x.shape[3], "rows of a block must be contiguous"
        # Bits are decoded in the kernel: not every architecture's compiler knows the fp8 types.
        tensors.append(x.view(torch.uint8) if x is not None and x.dtype.itemsize == 1 and x.is_floating_point() else x)
        strides += (0, 0) if x is None else x.stride()[:2]
    constants = {
        "K_KIND": KINDS[layer.k_format.name],
        "V_KIND": KINDS[layer.v_format.name],
        "K_DIM": layer.k_dim,
        "V_DIM": layer.v_dim,
        "K_PAD": padded(layer.k_dim),
        "V_PAD": padded(layer.v_dim),
        "PAGE": layer.block_tokens,
    }
    return tuple(tensors), tuple(strides), constants
