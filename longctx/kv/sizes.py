"""Exact bytes of a context from its geometry alone, before blocks, null block and windows' slack are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from longctx.kv.groups import LayerGroup, group_layers
from longctx.kv.policy import FormatPolicy
from longctx.models.spec import LayerSpec
from longctx.quant.formats import KVFormat


def geometry_groups(
    layers: int,
    kv_heads: int,
    head_dim: int,
    kv_format: KVFormat,
    block_tokens: int,
    window: int | None = None,
    window_layers: int | None = None,
    policy: FormatPolicy | None = None,
) -> tuple[LayerGroup, ...]:
    """Groups of a bare geometry: the last `window_layers` layers (all, if only `window` is given) have a window.

    `kv_format` is what "auto" stands for in `policy`.
    """
    num_window = 0 if window is None else (layers if window_layers is None else window_layers)
    specs = [
        LayerSpec(i, window if i >= layers - num_window else None, kv_heads, kv_heads, head_dim, head_dim, 1.0)
        for i in range(layers)
    ]
    return group_layers(specs, (policy or FormatPolicy()).table(specs, kv_format), block_tokens)


def with_format(groups: Sequence[LayerGroup], fmt: KVFormat) -> tuple[LayerGroup, ...]:
    """The same groups with K and V stored in `fmt`."""
    return tuple(
        replace(
            group,
            key=replace(group.key, k_format=fmt.name, v_format=fmt.name),
            layout=replace(group.layout, k_format=fmt, v_format=fmt),
        )
        for group in groups
    )


def vector_bytes(group: LayerGroup) -> tuple[int, int]:
    """Bytes of one token in all layers of a group: (data, scales), unaligned."""
    lay = group.layout
    vectors = lay.num_layers * lay.num_kv_heads
    data = lay.k_format.data_bytes(lay.k_dim) + lay.v_format.data_bytes(lay.v_dim)
    scales = lay.k_format.scale_bytes(lay.k_dim) + lay.v_format.scale_bytes(lay.v_dim)
    return vectors * data, vectors * scales


def request_bytes(groups: Sequence[LayerGroup], tokens: int) -> tuple[int, int]:
    """Bytes of one request's keys and values at `tokens` tokens: (data, scales). Window layers: min(n, W + sinks)."""
    data = scales = 0
    for group in groups:
        held = group.reach.held(tokens)
        group_data, group_scales = vector_bytes(group)
        data, scales = data + held * group_data, scales + held * group_scales
    return data, scales


def tokens_that_fit(groups: Sequence[LayerGroup], kv_memory: int, concurrency: int) -> int | None:
    """Longest n with `concurrency` requests' data in `kv_memory`, before scales and blocks; None if any n fits."""
    share = kv_memory // concurrency
    most = sorted({0} | {group.reach.most for group in groups if group.reach.most is not None}, reverse=True)
    for start in most:  # the cost is linear above each window's end
        used = request_bytes(groups, start)[0]
        slope = request_bytes(groups, start + 1)[0] - used
        if used <= share:
            return None if slope == 0 else start + (share - used) // slope
    raise AssertionError("zero tokens always fit")
