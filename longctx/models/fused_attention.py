"""Attention modules with one product for queries, keys and values, and one pass for head norms and rotation."""

# Shape legend: N tokens, I in features, E all heads of a token side by side, H heads, D head dim, R rotated dimensions.
from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longctx.models.fused_rows import norm_scale
from longctx.models.int8_linears import Int8Linear, join_linears
from longctx.models.linears import PackedLinear
from longctx.models.row_kernels import norm_and_rotate_heads

ATTENTIONS = frozenset(
    f"{family}Attention"
    for family in (
        *("Llama", "Qwen2", "Qwen3", "Mistral", "SmolLM3", "Granite", "Qwen3Moe"),
        *("Mixtral", "Phi3", "Gemma2", "Gemma3"),
    )
)
"""All of them project, split into heads, norm the heads (or not), rotate halves (or not), attend, project."""

_NO_SCALE = np.empty(0, dtype=np.float32)
_NO_TABLE = np.empty((0, 0), dtype=np.float32)
_PROBE = "longctx_probe"
PROBE_TOKENS = 9


class FusedAttention(nn.Module):
    """An attention module that hands the same queries, keys, values and settings to the attention interface.

    The settings (scale, window, soft-cap) are those of one call that `source` itself makes; `probe` says how. Queries,
    keys and values are views of one buffer [N, E]. There is no cache object: the interface owns the cache.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.layer_idx, self.config, self.head_dim = source.layer_idx, source.config, source.head_dim
        self.num_key_value_groups = source.num_key_value_groups
        self.qkv_proj, self.o_proj = _joined(source), source.o_proj
        self.in_features = self.qkv_proj.in_features
        num_q = self.o_proj.in_features // self.head_dim
        self._num_heads = (num_q, num_q // self.num_key_value_groups)
        self._scales, self._eps = (_NO_SCALE, _NO_SCALE), 0.0
        if hasattr(source, "q_norm"):
            (q_scale_D, self._eps), (k_scale_D, _) = norm_scale(source.q_norm), norm_scale(source.k_norm)
            self._scales = (q_scale_D, k_scale_D)
        self._rotates = bool(getattr(source, "use_rope", True))
        self._settings = probe(source, 1)[1]
        self._eager = sys.modules[type(source).__module__].eager_attention_forward

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[1, N, I] to ([1, N, I], what the interface returns beside its output)."""
        assert cache is None and past_key_values is None, "a fused model runs without a cache object"
        num_tokens = hidden_states.shape[1]
        qkv = self.qkv_proj(hidden_states)
        cos_NR, sin_NR = _NO_TABLE, _NO_TABLE
        if self._rotates:
            cos_NR, sin_NR = (table[0].numpy() for table in position_embeddings)
            assert hidden_states.shape[0] == 1 and len(cos_NR) == num_tokens, "models run on one flat batch"
        norm_and_rotate_heads(qkv[0].numpy(), self._num_heads, self.head_dim, self._scales, self._eps, cos_NR, sin_NR)
        num_q, num_k = self._num_heads
        heads = qkv.view(1, num_tokens, -1, self.head_dim).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self._eager)
        out, weights = attend(
            self,
            heads[:, :num_q],
            heads[:, num_q : num_q + num_k],
            heads[:, num_q + num_k :],
            attention_mask,
            **self._settings,
            **kwargs,
        )
        return self.o_proj(out.reshape(1, num_tokens, -1)), weights

    def extra_repr(self) -> str:
        return f"heads={self._num_heads}, head_dim={self.head_dim}, rotates={self._rotates}, {self._settings}"


def _joined(source: Any) -> PackedLinear | Int8Linear:
    """One linear for queries, keys and values, in this order."""
    if hasattr(source, "qkv_proj"):
        return source.qkv_proj
    parts = [source.q_proj, source.k_proj, source.v_proj]
    if isinstance(parts[0], Int8Linear):
        return join_linears(parts)
    biases = [part.bias for part in parts]
    bias = None if biases[0] is None else torch.cat(biases)
    return PackedLinear(torch.cat([part.dense() for part in parts]), bias)


def probe(attention: Any, num_tokens: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """What an attention module hands to the interface for random tokens, and what it makes of the answer.

    Returns queries, keys, values and the module's own output, then the keyword settings of the call. Fewer tokens are
    the first ones of more.
    """
    generator = torch.Generator().manual_seed(0)
    linear = attention.qkv_proj if hasattr(attention, "qkv_proj") else attention.q_proj
    x = torch.randn(1, PROBE_TOKENS, linear.in_features, generator=generator)[:, :num_tokens]
    angles = torch.randn(1, PROBE_TOKENS, _rotated_dims(attention) // 2, generator=generator)[:, :num_tokens]
    angles = angles.repeat(1, 1, 2)
    calls: list[tuple[list[torch.Tensor], dict[str, Any]]] = []
    AttentionInterface.register(_PROBE, _remember)
    before = attention.config._attn_implementation
    attention.config._attn_implementation = _PROBE
    try:
        out, _ = attention(
            hidden_states=x,
            position_embeddings=(angles.cos(), angles.sin()),
            attention_mask=None,
            longctx_calls=calls,
        )
    finally:
        attention.config._attn_implementation = before
    ((heads, settings),) = calls
    return [*heads, out], settings


def _remember(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    longctx_calls: list[tuple[list[torch.Tensor], dict[str, Any]]],
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function that notes its call and answers with the queries."""
    longctx_calls.append(([query.clone(), key.clone(), value.clone()], settings))
    return query.transpose(1, 2).contiguous(), None


def _rotated_dims(attention: Any) -> int:
    rope: Any = getattr(attention.config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor") or 1.0
    return int(attention.head_dim * share)
