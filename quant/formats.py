"""The KV formats: the exact bytes each costs and the codec that computes them, one registry."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longctx.quant.codec import Codec
from longctx.quant.exact import ExactCodec
from longctx.quant.fp8 import Fp8Codec
from longctx.quant.int4 import GROUP, Int4Codec
from longctx.quant.int8 import Int8Codec


@dataclass(frozen=True)
class KVFormat:
    """How one K or V vector of a (token, kv head) is stored.

    `bits` per element, `torch_dtype` of the pool's view of them (uint8 where two elements share a byte). `scales`
    values of `scale_dtype` for every `group` elements along the head dim (None: the whole head dim is one group).
    """

    name: str
    bits: int
    torch_dtype: torch.dtype
    codec: Codec
    scales: int = 0
    scale_dtype: torch.dtype = torch.float32
    group: int | None = None

    @property
    def lossy(self) -> bool:
        """Whether values are stored relative to scales: chosen by the user, and measured."""
        return self.scales > 0

    def stored_dim(self, dim: int) -> int:
        """Elements of `torch_dtype` that hold a vector of `dim`."""
        return self.data_bytes(dim) // self.torch_dtype.itemsize

    def num_scales(self, dim: int) -> int:
        """Scales (and zero points) of a vector of `dim`."""
        return self.scales * (1 if self.group is None else -(-dim // self.group))

    def data_bytes(self, dim: int) -> int:
        """Bytes of one vector's elements, without scales."""
        assert dim * self.bits % 8 == 0, f"head dim {dim} is not a whole number of bytes at {self.bits} bits"
        return dim * self.bits // 8

    def scale_bytes(self, dim: int) -> int:
        """Bytes of one vector's scales (and zero points)."""
        return self.num_scales(dim) * self.scale_dtype.itemsize


FORMATS = {
    f.name: f
    for f in (
        KVFormat("fp32", 32, torch.float32, ExactCodec(torch.float32)),
        KVFormat("bf16", 16, torch.bfloat16, ExactCodec(torch.bfloat16)),
        KVFormat("fp16", 16, torch.float16, ExactCodec(torch.float16)),
        KVFormat("fp8_e4m3", 8, torch.float8_e4m3fn, Fp8Codec(torch.float8_e4m3fn), scales=1),
        KVFormat("fp8_e5m2", 8, torch.float8_e5m2, Fp8Codec(torch.float8_e5m2), scales=1),
        KVFormat("int8", 8, torch.int8, Int8Codec(), scales=1),
        KVFormat("int4", 4, torch.uint8, Int4Codec(), scales=2, scale_dtype=torch.bfloat16, group=GROUP),
    )
}

_BY_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def get_format(name: str) -> KVFormat:
    """The format called `name`; raises `KeyError` naming the known ones."""
    if name not in FORMATS:
        raise KeyError(f"unknown KV format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of_dtype(dtype: str) -> KVFormat:
    """The exact format of a model computing in `dtype` ("float32", "bfloat16", "float16")."""
    return FORMATS[_BY_DTYPE[dtype]]
