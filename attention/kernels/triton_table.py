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


def decode_tile(arch: int, compute: torch.dtype, codes: bool, pad: int) -> DecodeTile:
    """Constants of the decode kernel on `arch` (80, 90, 100).

    `compute` is the queries' dtype, `codes` whether keys or values are stored as codes, `pad` the larger padded head
    dim of the two.
    """
    if arch == INTERPRETER:
        return DecodeTile(256, 64, 4, 1)
    if compute == torch.float32:
        return DecodeTile(512, 32 if pad <= 128 else 16, 4, 2)
    return DecodeTile(512, 64 if pad <= 128 else 32, 4, 3)


def prefill_tile(arch: int, compute: torch.dtype, codes: bool, pad: int) -> PrefillTile:
    """Constants of the prefill kernel, by the same names."""
    if arch == INTERPRETER:
        return PrefillTile(64, 64, 4, 1)
    if compute == torch.float32:
        return PrefillTile(16 if pad > 64 else 32, 32, 8 if pad > 128 else 4, 2)
    # On sm_80 queries stay in registers: of the largest heads half as many keys, and of decoded ones, fit beside them.
    if pad > 128:
        # The compiler for sm_90 (triton 3.7.1) spills int4's decoding with more.
        return PrefillTile(32 if codes and arch == 90 else 64, 32 if codes or arch == 80 else 64, 8, 2)
    if not codes:
        return PrefillTile(128, 64, 4 if pad <= 64 else 8, 3)
    return PrefillTile(128, 32 if arch == 80 and pad > 64 else 64, 8, 3)
