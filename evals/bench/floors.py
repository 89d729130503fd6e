"""What no implementation can beat on a machine: the arithmetic of a prefill, the bytes of a decode step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def visible_pairs(start: int, n: int, window: int | None) -> int:
    """Pairs (query, key) that queries at positions [start, start + n) see, causal and within `window` keys."""

    def up_to(end: int) -> int:
        """Pairs of the queries at positions [0, end)."""
        if window is None or end <= window:
            return end * (end + 1) // 2
        return window * (window + 1) // 2 + (end - window) * window

    return up_to(start + n) - up_to(start)


def pair_flops(layer: LayerSpec) -> int:
    """Operations of one pair over all heads: 4 H D, or 2 H (Dk + Dv) where K and V differ."""
    return 2 * layer.num_heads * (layer.k_dim + layer.v_dim)


def prefill_floor(spec: ModelSpec, n: int, start: int = 0) -> Floor:
    """Tokens [start, start + n) computed once, and one row of the LM head."""
    linears = 2 * spec.active_linear_params * n
    attention = sum(pair_flops(layer) * visible_pairs(start, n, layer.window) for layer in spec.layers)
    return Floor(flops=linears + attention + 2 * spec.head_params)


def decode_floor(
    spec: ModelSpec, context: float, kv_bytes: Mapping[int, int] | None = None, weight_bytes: float | None = None
) -> Floor:
    """One token at a context of `context` keys, its own included; a mean over several steps may be fractional.

    `kv_bytes` are the stored bytes of one token's K and V by layer (default: the model's dtype), `weight_bytes` those
    of one weight (default likewise). Every linear weight and the LM head are read once.
    """
    size = DTYPE_BYTES[spec.dtype]
    weights = (spec.active_linear_params + spec.head_params) * (size if weight_bytes is None else weight_bytes)
    return Floor(bytes_read=weights + attention_bytes(spec, context, kv_bytes))


def attention_bytes(spec: ModelSpec, context: float, kv_bytes: Mapping[int, int] | None = None) -> float:
    """Bytes of keys and values that one decode step reads: min(context, window) per window layer, all in the others."""
    size = DTYPE_BYTES[spec.dtype]
    total = 0.0
    for layer in spec.layers:
        per_token = layer.num_kv_heads * (layer.k_dim + layer.v_dim) * size
        if kv_bytes is not None:
            per_token = kv_bytes[layer.index]
        total += per_token * min(context, layer.window or context)
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
