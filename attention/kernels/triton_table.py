"""The constants that the Triton attention kernels are launched with, committed: nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

INTERPRETER = 0
"""The architecture of Triton's interpreter, which runs kernels on CPU tensors."""


@dataclass(frozen=True)
class DecodeTile:
    """Keys of a split and of a tile of it; warps and pipeline stages of a program."""

    split: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class PrefillTile:
    """Query positions and keys of a tile; warps and pipeline stages of a program."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_tile(arch: int, compute: torch.dtype, pad: int) -> DecodeTile:
    """Constants of the decode kernel on `arch` (80, 90, 100) for the larger padded head dim of K and V."""
    if arch == INTERPRETER:
        return DecodeTile(256, 64, 4, 1)
    if compute == torch.float32:
        return DecodeTile(512, 32, 4, 2)
    return DecodeTile(512, 64 if pad <= 128 else 32, 4, 3)


def prefill_tile(arch: int, compute: torch.dtype, pad: int) -> PrefillTile:
    """Constants of the prefill kernel, as for `decode_tile`."""
    if arch == INTERPRETER:
        return PrefillTile(64, 64, 4, 1)
    if compute == torch.float32:
        return PrefillTile(32, 32, 4, 2)
    if pad <= 64:
        return PrefillTile(128, 64, 4, 3)
    if pad <= 128:
        return PrefillTile(128, 64, 8, 3)
    return PrefillTile(64, 64, 8, 2)
