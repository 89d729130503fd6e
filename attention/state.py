"""Attention states and the one operator by which partial results meet."""

# Shape legend: T query tokens, H query heads, D head dim.
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttnState:
    """Attention over some set of keys, mergeable with attention over any disjoint set.

    `out` [T, H, D] fp32 is the normalized output, `lse` [T, H] fp32 the natural-log sum of exponentiated scores.
    A row that saw no key is `(0, -inf)`, the identity of `merge`. (Online softmax: Milakov and Gimelshein 2018;
    the state algebra: Ye et al., FlashInfer, 2025.)
    """

    out: torch.Tensor
    lse: torch.Tensor


def empty_state(num_tokens: int, num_heads: int, dim: int, device: torch.device | str = "cpu") -> AttnState:
    """The identity of `merge`: out zeros [T, H, D], lse -inf [T, H]."""
    return AttnState(
        torch.zeros(num_tokens, num_heads, dim, dtype=torch.float32, device=device),
        torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float32, device=device),
    )


def merge(a: AttnState, b: AttnState) -> AttnState:
    """Attention over the union of two disjoint key sets: associative, commutative, identity `(0, -inf)`.

    Merging with the identity returns the other operand bit for bit; empty with empty is empty, never NaN.
    """
    weight_a, weight_b, lse = _weights(a.lse, b.lse)
    return AttnState(a.out * weight_a + b.out * weight_b, lse)


_MERGE_KERNELS: dict[str, Callable[[AttnState, AttnState], None]] = {}


def use_merge_kernel(device_type: str, kernel: Callable[[AttnState, AttnState], None] | None) -> None:
    """From now on `merge_into` uses `kernel` for this process's states on such devices; None: torch's operators."""
    if kernel is None:
        _MERGE_KERNELS.pop(device_type, None)
    else:
        _MERGE_KERNELS[device_type] = kernel


def merge_into(state: AttnState, part: AttnState) -> None:
    """`merge` in place, bit for bit unless a kernel computes it: `state` becomes the union, `part` is used up."""
    if kernel := _MERGE_KERNELS.get(state.out.device.type):
        kernel(state, part)
        return
    weight_a, weight_b, lse = _weights(state.lse, part.lse)
    state.out.mul_(weight_a).add_(part.out.mul_(weight_b))
    state.lse.copy_(lse)


def _weights(lse_a: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each side's share of the union [T, H, 1], and the union's LSE [T, H]."""
    top = torch.maximum(lse_a, lse_b)
    # Where both are empty, top is -inf and -inf - -inf would be NaN: any finite stand-in gives weights of exactly 0.
    top = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    weight_a = torch.exp(lse_a - top)
    weight_b = torch.exp(lse_b - top)
    total = weight_a + weight_b
    scale = torch.where(total == 0, torch.zeros_like(total), total.reciprocal())
    return (weight_a * scale).unsqueeze(-1), (weight_b * scale).unsqueeze(-1), top + torch.log(total)
