"""Layer groups: layers whose keys and values are stored alike share one pool and one block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longctx.attention.reach import Reach
from longctx.kv.policy import FormatPolicy, effective_text, kind_of
from longctx.models.spec import LayerSpec, ModelSpec
from longctx.quant.formats import FORMATS, KVFormat, format_of_dtype
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


def make_groups(spec: ModelSpec, block_tokens: int, policy: FormatPolicy) -> tuple[LayerGroup, ...]:
    """The groups of a model whose layers are stored as `policy` says; raises `LongctxError` where they cannot be."""
    return group_layers(spec.layers, policy.table(spec.layers, format_of_dtype(spec.dtype)), block_tokens)


def group_layers(
    layers: Sequence[LayerSpec], formats: Sequence[tuple[KVFormat, KVFormat]], block_tokens: int
) -> tuple[LayerGroup, ...]:
    """Group layers that are alike, with their (K, V) formats: full-attention groups first, then by the first layer."""
    layers_of: dict[GroupKey, list[int]] = {}
    for layer, (k_format, v_format) in zip(layers, formats, strict=True):
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
            tuple(indices),
            BlockLayout(
                len(indices),
                key.num_kv_heads,
                block_tokens,
                key.k_dim,
                key.v_dim,
                FORMATS[key.k_format],
                FORMATS[key.v_format],
            ),
        )
        for index, (key, indices) in enumerate(ordered)
    )


def formats_text(groups: Sequence[LayerGroup]) -> str:
    """How all layers are stored, in the words of a policy: one format where they are alike."""
    return effective_text(
        {layer: (kind_of(g.key.mask_kind), g.key.k_format, g.key.v_format) for g in groups for layer in g.layers}
    )
