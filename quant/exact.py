"""fp32, bf16 and fp16: elements as they are, rounded to the dtype."""

from __future__ import annotations

import torch

FP16_MAX = 65504.0


class ExactCodec:
    """Stores a cast. fp16 ends at 65,504: what is larger is stored as that, for one infinite key would make every later
    query's attention NaN."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self._dtype == torch.float16:
            # As fp32, for bf16 has no 65,504: the bound itself would be rounded up to 65,536.
            x = x.float().clamp_(-FP16_MAX, FP16_MAX) if x.dtype != torch.float32 else x.clamp(-FP16_MAX, FP16_MAX)
        return x.to(self._dtype), None

    def decode(self, data: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor) -> None:
        out.copy_(data)
