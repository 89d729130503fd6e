"""What a format's codec computes: vectors to stored elements and scales, and back."""

# Shape legend: D head dim, S stored elements of a vector, C its scales.
from __future__ import annotations

from typing import Protocol

import torch

LEAST_SCALE = 1e-37
"""Vectors whose scale would be smaller are stored as zeros: one over it would not be finite."""


class Codec(Protocol):
    """The reference arithmetic of a format, in torch operators, elementwise over all leading dimensions.

    Promises: a vector's codes depend on nothing but that vector; every kernel that writes the format computes the same
    codes bit for bit. Elements under one scale read back as NaN if one of them is not finite, so that the request that
    wrote it fails and nothing wraps unseen; without scales they read back as they were. Zeros read back as zeros.
    """

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[..., D] of any float dtype to stored elements [..., S] and scales [..., C] (None where there are none)."""
        ...

    def decode(self, data: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor) -> None:
        """Stored elements [..., S] and scales [..., C] into `out` [..., D]."""
        ...


def symmetric_scale(x: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, inverse) [..., 1] fp32 that map the largest magnitude of `x` [..., D] fp32 to `largest`.

    Both are 0 for a vector of (next to) nothing. A vector that is not finite has the scale NaN and the inverse 0.
    """
    top = x.abs().amax(-1, keepdim=True)
    scale = top / largest
    usable = torch.isfinite(top) & (scale >= LEAST_SCALE)
    inverse = torch.where(usable, 1.0 / scale, 0.0)
    scale = torch.where(usable, scale, torch.where(torch.isfinite(top), 0.0, torch.nan))
    return scale, inverse
