"""Vectors that formats trip over, and pools compared bit by bit."""

# Shape legend: T tokens, K kv heads, B block tokens, D head dim.
from __future__ import annotations

import math

import torch

from longctx.quant.formats import FORMATS
from longctx.quant.layout import BlockLayout, LayerKV

BLOCK = 16


def poisoned_layer(
    k_fmt: str, v_fmt: str, k_dim: int, v_dim: int, device: str, heads: int = 2, slots: int = 7
) -> LayerKV:
    """The middle one of a pool's three layers, every byte of it poison."""
    layout = BlockLayout(3, heads, BLOCK, k_dim, v_dim, FORMATS[k_fmt], FORMATS[v_fmt])
    return layout.layer_view(torch.full((layout.block_bytes * slots,), 0x77, dtype=torch.uint8, device=device), 1)


def hard_vectors(num_heads: int, num_tokens: int, dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """[K, T, D] of all sizes, and in the first head every vector that a format could trip over; T is at least 15."""
    x = torch.randn(num_heads, num_tokens, dim) * torch.exp(4 * torch.randn(num_heads, num_tokens, 1))
    x[0, 0] = 0.0
    x[0, 1, 3] = math.inf
    x[0, 2, 5] = math.nan
    x[0, 3] *= 1e30
    x[0, 4], x[0, 5] = 1e-39, -1e-36
    x[0, 6, 0] = 1e5
    x[0, 7] = 0.0
    x[0, 7, ::2] = -0.0
    x[0, 8] = 3.0
    x[0, 9, 0] = -3.402e38
    x[0, 10, :2] = torch.tensor([3.402e38, -3.402e38])
    x[0, 11] = torch.arange(dim) * 0.5 - 17.0  # halves between codes of int8, whose scale is 1
    x[0, 11, -1] = 127.0
    x[0, 12] = torch.arange(dim) * 0.5 % 15.0  # and of int4
    x[0, 12, [0, dim - 1]] = torch.tensor([0.0, 15.0])
    x[0, 13] = torch.logspace(-8, 0, dim) * 448.0  # subnormal fp8
    x[0, 14] = torch.arange(dim) / 1024.0  # halves between them, for the scale is 1
    x[0, 14, -1] = 448.0
    return x.to(dtype).to(device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, on whatever devices, are the same bits; NaNs need not have the same payload."""
    a, b = a.cpu(), b.cpu()
    if a.dtype in (torch.bfloat16, torch.float16, torch.float32):
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        a, b = a.masked_fill(nan, 1.0), b.masked_fill(nan, 1.0)
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_same_layer(a: LayerKV, b: LayerKV) -> None:
    for name in ("k", "v", "k_scale", "v_scale"):
        x, y = getattr(a, name), getattr(b, name)
        assert x is y is None or same_bits(x, y), f"{name} differs"
