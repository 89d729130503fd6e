"""fp8_e4m3 and fp8_e5m2: one fp32 scale per (token, kv head), small elements kept relatively as exact as large ones."""

from __future__ import annotations

import torch

from longctx.quant.codec import symmetric_scale


class Fp8Codec:
    """x = code * scale, the vector's largest element at the format's largest (448 or 57,344).

    The error is 1/16 (e4m3) or 1/8 (e5m2) of an element, or half a step of the smallest subnormal. No code is infinite
    or NaN, so that codes may be decoded from their bits.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._largest = float(torch.finfo(dtype).max)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.float()
        scale, inverse = symmetric_scale(x, self._largest)
        codes = (x * inverse).nan_to_num_(0.0).clamp_(-self._largest, self._largest)
        return codes.to(self._dtype), scale

    def decode(self, data: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor) -> None:
        assert scales is not None
        torch.mul(data.to(torch.float32), scales, out=out)
