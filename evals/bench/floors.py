"""What no implementation can beat on a machine: the arithmetic of a prefill, the bytes of a decode step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longctx.attention.reach import Reach
from longctx.evals.bench.limits import Limits
from longctx.models.spec import DTYPE_BYTES, LayerSpec, ModelSpec


@dataclass(frozen=True)
class Floor:
    """A least amount of work: floating-point operations, or bytes that must be read."""

    flops: float = 0.0
    bytes_read: float = 0.0

    def seconds(self, limits: Limits) -> float:
        """The least time: whichever of the two takes longer."""
        return max(self.flops / limits.flops, self.bytes_read / limits.read_bytes_per_s)


def visible_pairs(start: int, n: int, reach: Reach) -> int:
    """Pairs (query, key) that queries at positions [start, start + n) see."""

    def within(end: int, most: int) -> int:
        """Pairs of `end` queries of which each sees one key more than the one before, and at most `most`."""
        first = min(end, most)
        return first * (first + 1) // 2 + (end - first) * most

    def up_to(end: int) -> int:
        """Pairs of the queries at positions [0, end)."""
        if reach.local_chunk is not None:
            whole, rest = divmod(end, reach.local_chunk)
            return whole * within(reach.local_chunk, reach.local_chunk) + within(rest, rest)
        if reach.window is None:
            return within(end, end)
        # From position W on, each query leaves one key of the front behind, which is a sink or not.
        return within(end, reach.window) + within(max(0, end - reach.window), reach.sinks)

    return up_to(start + n) - up_to(start)


def pair_flops(layer: LayerSpec) -> int:
    """Operations of one pair over all heads: 4 H D, or 2 H (Dk + Dv) where K and V differ."""
    return 2 * layer.num_heads * (layer.k_dim + layer.v_dim)


def prefill_floor(spec: ModelSpec, n: int, start: int = 0) -> Floor:
    """Tokens [start, start + n) computed once, and one row of the LM head."""
    linears = 2 * spec.active_linear_params * n
    attention = sum(pair_flops(layer) * visible_pairs(start, n, layer.reach) for layer in spec.layers)
    return Floor(flops=linears + attention + 2 * spec.head_params)


def decode_floor(
    spec: ModelSpec, context: float, kv_bytes: Mapping[int, int] | None = None, weight_bytes: float | None = None
) -> Floor:
    """One token at a context of `context` keys, its own included; a mean over several steps may be fractional.

    `kv_bytes` are the stored bytes of one token's K and V by layer (default: the model's dtype), `weight_bytes` those
    of one weight (default: as the spec holds them, scales included). Every linear weight and the LM head are read once.
    """
    weights: float = spec.step_weight_bytes
    if weight_bytes is not None:
        weights = (spec.active_linear_params + spec.head_params) * weight_bytes
    return Floor(bytes_read=weights + attention_bytes(spec, context, kv_bytes))


def attention_bytes(spec: ModelSpec, context: float, kv_bytes: Mapping[int, int] | None = None) -> float:
    """Bytes of keys and values that one decode step reads: what each layer sees of the context."""
    size = DTYPE_BYTES[spec.dtype]
    total = 0.0
    for layer in spec.layers:
        per_token = layer.num_kv_heads * (layer.k_dim + layer.v_dim) * size
        if kv_bytes is not None:
            per_token = kv_bytes[layer.index]
        total += per_token * layer.reach.keys(context)
    return total


def stored_bytes(engine: Any) -> dict[int, int]:
    """Bytes of one token's K and V in each layer as an engine stores them, scales included."""
    found = {}
    for group in engine.groups:
        key, layout = group.key, group.layout
        k = layout.k_format.data_bytes(key.k_dim) + layout.k_format.scale_bytes(key.k_dim)
        v = layout.v_format.data_bytes(key.v_dim) + layout.v_format.scale_bytes(key.v_dim)
        found.update(dict.fromkeys(group.layers, key.num_kv_heads * (k + v)))
    return found
