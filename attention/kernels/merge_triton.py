"""Merges two attention states in one pass on a GPU: the operator of `attention.state`, for states that lie anyhow."""

# Shape legend: T query tokens, H query heads, D head dim.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from longctx.attention.state import AttnState, use_merge_kernel
from longctx.quant.kernel_variant import KernelVariant

ROWS = 16
"""(token, head) pairs of one program."""


@triton.jit
def _merge_kernel(
    out_ptr,
    lse_ptr,
    part_out_ptr,
    part_lse_ptr,
    num_rows,
    num_heads,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    part_out_token_stride,
    part_out_head_stride,
    part_lse_token_stride,
    part_lse_head_stride,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid [tiles of T * H rows]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    token, head = row // num_heads, row % num_heads
    lse_at = lse_ptr + token * lse_token_stride + head * lse_head_stride
    part_lse_at = part_lse_ptr + token * part_lse_token_stride + head * part_lse_head_stride
    lse = tl.load(lse_at, live, other=float("-inf"))
    part_lse = tl.load(part_lse_at, live, other=float("-inf"))
    top = tl.maximum(lse, part_lse)
    # Both empty: -inf less -inf would be NaN; any finite stand-in gives two weights of 0.
    top = tl.where(top == float("-inf"), 0.0, top)
    weight, part_weight = tl.exp(lse - top), tl.exp(part_lse - top)
    total = weight + part_weight
    share = tl.where(total == 0.0, 0.0, 1.0 / total)
    weight, part_weight = weight * share, part_weight * share
    i = tl.arange(0, triton.next_power_of_2(DIM))
    mask = live[:, None] & (i < DIM)[None, :]
    out_at = out_ptr + (token * out_token_stride + head * out_head_stride)[:, None] + i[None, :]
    part_at = part_out_ptr + (token * part_out_token_stride + head * part_out_head_stride)[:, None] + i[None, :]
    merged = (
        tl.load(out_at, mask, other=0.0) * weight[:, None] + tl.load(part_at, mask, other=0.0) * part_weight[:, None]
    )
    tl.store(out_at, merged, mask)
    tl.store(lse_at, top + tl.log(total), live)


def install(device_type: str = "cuda") -> None:
    """Let `attention.state.merge_into` use the kernel; on "cpu" only Triton's interpreter can run it."""
    use_merge_kernel(device_type, merge_into)


def merge_into(state: AttnState, part: AttnState) -> None:
    """`attention.state.merge_into` in one launch: `state` becomes the union, `part` stays as it is.

    Every tensor may be strided, but for the head dim of the outputs; merging with an empty state changes no bit.
    """
    num_tokens, num_heads, dim = state.out.shape
    assert part.out.shape == state.out.shape and part.lse.shape == state.lse.shape == (num_tokens, num_heads)
    tensors = (state.out, state.lse, part.out, part.lse)
    assert all(x.dtype == torch.float32 for x in tensors), "states are fp32"
    assert state.out.stride(2) == part.out.stride(2) == 1, "a head's values must lie side by side"
    if num_tokens == 0:
        return
    _merge_kernel[(triton.cdiv(num_tokens * num_heads, ROWS),)](
        *tensors,
        num_tokens * num_heads,
        num_heads,
        *(stride for x in tensors for stride in x.stride()[:2]),
        DIM=dim,
        ROWS=ROWS,
        enable_fp_fusion=False,
    )


def variants(arch: int) -> list[KernelVariant]:
    """Every head dim."""
    del arch  # nothing here depends on it
    types = ["*fp32"] * 4 + ["i32"] * 10 + ["constexpr"] * 2
    signature = dict(zip(_merge_kernel.arg_names, types, strict=True))
    divisible = ("out_token_stride", "out_head_stride", "part_out_token_stride", "part_out_head_stride")
    return [
        KernelVariant(
            "merge",
            _merge_kernel,
            signature,
            {"DIM": dim, "ROWS": ROWS},
            divisible=divisible,
            options={"enable_fp_fusion": False},
        )
        for dim in (64, 80, 96, 128, 256)
    ]
