"""The KV formats and the exact bytes each costs; kernels for the lossy ones live in files of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVFormat:
    """How one K or V vector of a (token, kv head) is stored.

    `bits` per element; `scale_bytes_per_group` for every group of `group` elements along the head dim (None: the
    whole head dim is one group). `torch_dtype` is what the pool's view has; None where elements share a byte.
    """

    name: str
    bits: int
    torch_dtype: torch.dtype | None
    scale_bytes_per_group: int = 0
    group: int | None = None
    lossy: bool = False

    def data_bytes(self, dim: int) -> int:
        """Bytes of one vector's elements, without scales."""
        assert dim * self.bits % 8 == 0, f"head dim {dim} is not a whole number of bytes at {self.bits} bits"
        return dim * self.bits // 8

    def scale_bytes(self, dim: int) -> int:
        """Bytes of one vector's scales (and zero points)."""
        groups = 1 if self.group is None else -(-dim // self.group)
        return groups * self.scale_bytes_per_group


FORMATS = {
    f.name: f
    for f in (
        KVFormat("fp32", 32, torch.float32),
        KVFormat("bf16", 16, torch.bfloat16),
        KVFormat("fp16", 16, torch.float16),
        KVFormat("fp8_e4m3", 8, torch.float8_e4m3fn, scale_bytes_per_group=4, lossy=True),
        KVFormat("fp8_e5m2", 8, torch.float8_e5m2, scale_bytes_per_group=4, lossy=True),
        KVFormat("int8", 8, torch.int8, scale_bytes_per_group=4, lossy=True),
        KVFormat("int4", 4, None, scale_bytes_per_group=4, group=64, lossy=True),
    )
}

STORABLE = ("fp32", "bf16", "fp16")
"""Formats whose kernels exist; the others can be planned for but not yet run."""

_BY_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def get_format(name: str) -> KVFormat:
    """The format called `name`; raises `KeyError` naming the known ones."""
    if name not in FORMATS:
        raise KeyError(f"unknown KV format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of_dtype(dtype: str) -> KVFormat:
    """The exact format of a model computing in `dtype` ("float32", "bfloat16", "float16")."""
    return FORMATS[_BY_DTYPE[dtype]]
