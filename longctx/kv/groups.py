"""Layer groups: layers whose keys and values are stored alike share one pool and one block table."""

from __future__ import annotations

from dataclasses import dataclass

from longctx.attention.reach import Reach
from longctx.models.spec import ModelSpec
from longctx.quant.formats import KVFormat
from longctx.quant.layout import BlockLayout


@dataclass(frozen=True)
class GroupKey:
    """What makes two layers share a pool."""

    window: int | None
    num_kv_heads: int
    k_dim: int
    v_dim: int
    k_format: str
    v_format: str
    sinks: int = 0
    local_chunk: int | None = None

    @property
    def reach(self) -> Reach:
        return Reach(self.window, self.sinks, self.local_chunk)

    @property
    def mask_kind(self) -> str:
        return self.reach.kind


@dataclass(frozen=True)
class LayerGroup:
    """The layers (model indices, ascending) of one group, and the layout of its blocks."""

    index: int
    key: GroupKey
    layers: tuple[int, ...]
    layout: BlockLayout

    @property
    def window(self) -> int | None:
        return self.key.window

    @property
    def reach(self) -> Reach:
        return self.key.reach

    @property
    def is_full(self) -> bool:
        """Whether every block of a running request is held to its end."""
        return self.key.mask_kind == "full"


def make_groups(spec: ModelSpec, block_tokens: int, k_format: KVFormat, v_format: KVFormat) -> tuple[LayerGroup, ...]:
    """Group a model's layers, full-attention groups first, then by the first layer's index."""
    layers_of: dict[GroupKey, list[int]] = {}
    for layer in spec.layers:
        key = GroupKey(
            layer.window,
            layer.num_kv_heads,
            layer.k_dim,
            layer.v_dim,
            k_format.name,
            v_format.name,
            layer.sinks,
            layer.local_chunk,
        )
        layers_of.setdefault(key, []).append(layer.index)
    ordered = sorted(layers_of.items(), key=lambda item: (item[0].mask_kind != "full", item[1][0]))
    return tuple(
        LayerGroup(
            index,
            key,
            tuple(layers),
            BlockLayout(len(layers), key.num_kv_heads, block_tokens, key.k_dim, key.v_dim, k_format, v_format),
        )
        for index, (key, layers) in enumerate(ordered)
    )
