"""int8: symmetric, one fp32 scale per (token, kv head); half a step of error, 1/254 of the largest element."""

from __future__ import annotations

import torch

from longctx.quant.codec import symmetric_scale

LARGEST = 127.0


class Int8Codec:
    """x = code * scale, codes -127 to 127, rounded to the nearest, halves to even."""

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.float()
        scale, inverse = symmetric_scale(x, LARGEST)
        # A vector that is not finite has codes of no meaning under a scale of NaN; none may be undefined.
        codes = torch.round(x * inverse).nan_to_num_(0.0).clamp_(-LARGEST, LARGEST)
        return codes.to(torch.int8), scale

    def decode(self, data: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor) -> None:
        assert scales is not None
        torch.mul(data, scales, out=out)
