"""The bytes of a block: equal segments, one per layer, K and V apart, every part aligned."""

# Shape legend: N slots, K kv heads, B block tokens, D head dim.
from __future__ import annotations

from dataclasses import dataclass

import torch

from longctx.quant.formats import KVFormat

LAYOUT_VERSION = 1
ALIGN = 64


def align_up(num_bytes: int, alignment: int = ALIGN) -> int:
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True)
class LayerKV:
    """One layer's window onto a pool: `k` [N, K, B, Dk] and `v` [N, K, B, Dv], strided views of the pool's bytes.

    Rows of a slot past the written tokens may hold anything, NaN included. Offsets are 64-bit.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_format: KVFormat
    v_format: KVFormat

    @property
    def block_tokens(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True)
class BlockLayout:
    """Where everything lies in a block of one layer group.

    A block is `num_layers` segments of `segment_bytes`; a segment is K data [K, B, Dk], then V data [K, B, Dv], then K
    scales, then V scales, each part aligned to 64 bytes. Head-major, so that one kv head's rows are contiguous and a
    rank's share of the heads is one range. Version `LAYOUT_VERSION` is part of every stored block's name.
    """

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    k_dim: int
    v_dim: int
    k_format: KVFormat
    v_format: KVFormat

    @property
    def k_bytes(self) -> int:
        return align_up(self.num_kv_heads * self.block_tokens * self.k_format.data_bytes(self.k_dim))

    @property
    def v_bytes(self) -> int:
        return align_up(self.num_kv_heads * self.block_tokens * self.v_format.data_bytes(self.v_dim))

    @property
    def scale_bytes(self) -> int:
        vectors = self.num_kv_heads * self.block_tokens
        return align_up(vectors * self.k_format.scale_bytes(self.k_dim)) + align_up(
            vectors * self.v_format.scale_bytes(self.v_dim)
        )

    @property
    def segment_bytes(self) -> int:
        return self.k_bytes + self.v_bytes + self.scale_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.segment_bytes

    def layer_view(self, pool: torch.Tensor, layer: int) -> LayerKV:
        """The view of segment `layer` over a flat uint8 `pool` of N * block_bytes bytes."""
        assert pool.dtype == torch.uint8 and pool.dim() == 1 and pool.numel() % self.block_bytes == 0
        assert 0 <= layer < self.num_layers
        k_start = layer * self.segment_bytes
        return LayerKV(
            self._vectors(pool, k_start, self.k_format, self.k_dim),
            self._vectors(pool, k_start + self.k_bytes, self.v_format, self.v_dim),
            self.k_format,
            self.v_format,
        )

    def _vectors(self, pool: torch.Tensor, start: int, fmt: KVFormat, dim: int) -> torch.Tensor:
        assert fmt.torch_dtype is not None
        size = fmt.bits // 8
        typed = pool.view(fmt.torch_dtype)
        shape = (pool.numel() // self.block_bytes, self.num_kv_heads, self.block_tokens, dim)
        strides = (self.block_bytes // size, self.block_tokens * dim, dim, 1)
        return typed.as_strided(shape, strides, start // size)
