"""int4: asymmetric, groups of 64 along the head dim, each with a bf16 step and a bf16 lowest value."""

# Shape legend: D head dim, E elements of one group.
from __future__ import annotations

import torch

GROUP = 64
LARGEST = 15.0


class Int4Codec:
    """x = low + code * step, codes 0 to 15. Scales are [step, low] group by group.

    bf16 has fp32's range, so no outlier is clipped; low is rounded down and the step up, so that the codes reach both
    ends and the error is half a step. In a group of E elements byte i holds element i in its low half and element
    i + E/2 in its high half: kernels unpack whole vectors without shuffles. A head dim that is no multiple of 64 ends
    in a smaller group.
    """

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.float()
        data, scales = [], []
        for begin in range(0, x.shape[-1], GROUP):
            part = x[..., begin : begin + GROUP]
            assert part.shape[-1] % 2 == 0
            # Plus zero: which of 0.0 and -0.0 is found depends on the order of the search.
            bottom, top = part.amin(-1, keepdim=True) + 0.0, part.amax(-1, keepdim=True) + 0.0
            low = _bf16_towards(bottom, up=False)
            step = _bf16_towards((top - low) / LARGEST, up=True)
            finite = torch.isfinite(step) & torch.isfinite(low)
            inverse = torch.where(finite & (step > 0), 1.0 / step, 0.0).nan_to_num_(0.0, 0.0, 0.0)
            codes = torch.round((part - low) * inverse).nan_to_num_(0.0).clamp_(0.0, LARGEST).to(torch.uint8)
            half = part.shape[-1] // 2
            data.append(codes[..., :half] | codes[..., half:] << 4)
            # Chosen in bf16, where NaN is one number: a conversion makes more than one of it.
            scales += [torch.where(finite, x.to(torch.bfloat16), torch.nan) for x in (step, low)]
        return torch.cat(data, -1), torch.cat(scales, -1)

    def decode(self, data: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor) -> None:
        assert scales is not None
        for group, begin in enumerate(range(0, out.shape[-1], GROUP)):
            part = out[..., begin : begin + GROUP]
            half = part.shape[-1] // 2
            packed = data[..., begin // 2 : begin // 2 + half]
            step, low = (scales[..., 2 * group + i : 2 * group + i + 1].float() for i in (0, 1))
            part[..., :half] = (packed & 15) * step + low
            part[..., half:] = (packed >> 4) * step + low


def _bf16_towards(x: torch.Tensor, *, up: bool) -> torch.Tensor:
    """The nearest value not below (`up`) or not above `x` that bf16 can hold, as fp32; infinite beyond the last one."""
    rounded = x.to(torch.bfloat16)
    neighbour = torch.nextafter(rounded, torch.full_like(rounded, torch.inf if up else -torch.inf))
    wrong = rounded.float() < x if up else rounded.float() > x
    return torch.where(wrong, neighbour, rounded).float()
