"""Weights in int8: one scale per output, laid out as the product kernel reads them."""

# Shape legend: I in features, P the same padded to whole groups, O out features, Q the same padded to whole panels.
from __future__ import annotations

from dataclasses import dataclass

import torch

from longctx.models.int8_tile import GROUP, PANEL, WEIGHT_ZERO
from longctx.models.mapped import drop_pages

ROWS_AT_ONCE = 32 * PANEL
"""Rows of a weight that are quantized at a time: a few MB of temporary memory, however large the weight is."""


@dataclass(frozen=True)
class Int8Weight:
    """A weight [O, I] as codes and scales: w = code * scale, the largest magnitude of each row being code 127.

    `packed` [Q / PANEL, P / 4, PANEL, 4] uint8 holds code + 128; `scale_O` is fp32. A row with a value that is not
    finite has the scale NaN, a row of zeros the scale 0.
    """

    packed: torch.Tensor
    scale_O: torch.Tensor
    in_features: int

    @property
    def out_features(self) -> int:
        return len(self.scale_O)

    def codes(self) -> torch.Tensor:
        """int8 [O, I], a copy."""
        panels, steps = self.packed.shape[:2]
        rows = self.packed.transpose(1, 2).reshape(panels * PANEL, steps * 4)[: self.out_features, : self.in_features]
        return (rows.to(torch.int16) - WEIGHT_ZERO).to(torch.int8)

    def dense(self) -> torch.Tensor:
        """fp32 [O, I], a copy."""
        return self.codes() * self.scale_O[:, None]


def int8_bytes(out_features: int, in_features: int) -> int:
    """What a weight takes: its codes with their padding, and its scales."""
    panels, groups = -(-out_features // PANEL), -(-in_features // GROUP)
    return panels * PANEL * groups * GROUP + 4 * out_features


def quantize_weight(*parts_OI: torch.Tensor) -> Int8Weight:
    """Parts [O_n, I] of one weight, on top of each other, quantized some rows at a time.

    Of parts that are memory-mapped the pages are let go of as they are read.
    """
    in_features, out_features = parts_OI[0].shape[1], sum(len(part) for part in parts_OI)
    weight = _empty(out_features, in_features)
    codes, done = torch.empty(0, in_features, dtype=torch.int8), 0
    for part in parts_OI:
        for first in range(0, len(part), ROWS_AT_ONCE):
            rows = part[first : first + ROWS_AT_ONCE].detach().float()
            top = rows.abs().amax(1)
            scale = torch.where(top.isfinite(), top / 127, torch.nan)
            weight.scale_O[done + len(codes) : done + len(codes) + len(rows)] = scale
            new = torch.where(scale[:, None] > 0, rows / scale[:, None], 0.0).round().clamp(-127, 127).to(torch.int8)
            codes = torch.cat([codes, new])
            whole = len(codes) // PANEL * PANEL
            _pack(weight, codes[:whole], done)
            codes, done = codes[whole:], done + whole
            drop_pages(part[first : first + ROWS_AT_ONCE])
    _pack(weight, codes, done)
    return weight


def join(parts: list[Int8Weight]) -> Int8Weight:
    """Weights of the same inputs on top of each other: every output keeps its codes and its scale."""
    weight = _empty(sum(part.out_features for part in parts), parts[0].in_features)
    torch.cat([part.scale_O for part in parts], out=weight.scale_O)
    _pack(weight, torch.cat([part.codes() for part in parts]), 0)
    return weight


def _empty(out_features: int, in_features: int) -> Int8Weight:
    panels, groups = -(-out_features // PANEL), -(-in_features // GROUP)
    # Padding is code 0: what is computed for it is nothing, and is not stored.
    packed = torch.full((panels, groups * GROUP // 4, PANEL, 4), WEIGHT_ZERO, dtype=torch.uint8)
    return Int8Weight(packed, torch.empty(out_features), in_features)


def _pack(weight: Int8Weight, codes_OI: torch.Tensor, first: int) -> None:
    """Write the codes of rows [first, first + O), `first` being the beginning of a panel."""
    if not len(codes_OI):
        return
    panels, steps = -(-len(codes_OI) // PANEL), weight.packed.shape[1]
    padded = torch.zeros(panels * PANEL, steps * 4, dtype=torch.int16)
    padded[: len(codes_OI), : codes_OI.shape[1]] = codes_OI
    bytes_ = (padded + WEIGHT_ZERO).to(torch.uint8).view(panels, PANEL, steps, 4)
    weight.packed[first // PANEL : first // PANEL + panels] = bytes_.transpose(1, 2)
