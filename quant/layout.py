"""The bytes of a block: equal segments, one per layer, K and V apart, every part aligned."""

# Shape legend: N slots, K kv heads, B block tokens, D head dim, S stored elements of a vector, C its scales.
from __future__ import annotations

from dataclasses import dataclass

import torch

from longctx.quant.formats import KVFormat

LAYOUT_VERSION = 2
ALIGN = 64


def align_up(num_bytes: int, alignment: int = ALIGN) -> int:
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True)
class LayerKV:
    """One layer's window onto a pool: `k` and `v` [N, K, B, S], strided views of the pool's bytes in the stored dtype.

    `k_scale` and `v_scale` are [N, K, B, C], None for formats without scales. `k_dim` and `v_dim` are the head dims
    (S = D but where elements share a byte). Rows of a slot past the written tokens may hold anything, NaN included.
    Offsets are 64-bit.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_dim: int
    v_dim: int
    k_format: KVFormat
    v_format: KVFormat

    @property
    def block_tokens(self) -> int:
        return self.k.shape[2]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that is stored, each [N, K, B, ...]."""
        return tuple(x for x in (self.k, self.v, self.k_scale, self.v_scale) if x is not None)


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
        return self._vector_scales(self.k_format, self.k_dim) + self._vector_scales(self.v_format, self.v_dim)

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
        v_start = k_start + self.k_bytes
        k_scale_start = v_start + self.v_bytes
        v_scale_start = k_scale_start + self._vector_scales(self.k_format, self.k_dim)
        return LayerKV(
            self._view(pool, k_start, self.k_format.torch_dtype, self.k_format.stored_dim(self.k_dim)),
            self._view(pool, v_start, self.v_format.torch_dtype, self.v_format.stored_dim(self.v_dim)),
            self._scale_view(pool, k_scale_start, self.k_format, self.k_dim),
            self._scale_view(pool, v_scale_start, self.v_format, self.v_dim),
            self.k_dim,
            self.v_dim,
            self.k_format,
            self.v_format,
        )

    def _vector_scales(self, fmt: KVFormat, dim: int) -> int:
        return align_up(self.num_kv_heads * self.block_tokens * fmt.scale_bytes(dim))

    def _scale_view(self, pool: torch.Tensor, start: int, fmt: KVFormat, dim: int) -> torch.Tensor | None:
        return self._view(pool, start, fmt.scale_dtype, fmt.num_scales(dim)) if fmt.scales else None

    def _view(self, pool: torch.Tensor, start: int, dtype: torch.dtype, width: int) -> torch.Tensor:
        """[N, K, B, width] of `dtype` from byte `start` of every block on."""
        size = dtype.itemsize
        shape = (pool.numel() // self.block_bytes, self.num_kv_heads, self.block_tokens, width)
        strides = (self.block_bytes // size, self.block_tokens * width, width, 1)
        return pool.view(dtype).as_strided(shape, strides, start // size)
