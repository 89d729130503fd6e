"""The one hook into Hugging Face models: their attention calls arrive here, and no mask is ever built."""

# Shape legend: T tokens of the flat batch, H query heads, K kv heads, D head dim.
from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

ATTN_NAME = "longctx"


class AttentionPlan(Protocol):
    """What the hook needs of a step's plan; it travels through the model's forward as the keyword `longctx_plan`."""

    def attend_layer(
        self,
        layer: int,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sink_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store this layer's keys and values, attend to what is stored, return the output [T, H, Dv]."""
        ...


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    longctx_plan: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's attention interface: query [1, H, T, D], key and value [1, K, T, D], answer [1, T, H, Dv]."""
    assert attention_mask is None, "the mask function must have returned None"
    assert query.shape[0] == 1, "models run on one flat batch"
    out_THD = longctx_plan.attend_layer(
        module.layer_idx,  # type: ignore[arg-type]
        query[0],
        key[0],
        value[0],
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sink_H=s_aux,
    )
    return out_THD.unsqueeze(0).to(query.dtype), None


def temperature_of(module: torch.nn.Module) -> tuple[int, float] | None:
    """`LayerSpec.temperature` of an attention module.

    Llama 4's counts positions by the rows of the forward, which in a flat batch are several requests'.
    """
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        return int(module.floor_scale), float(module.attn_scale)  # type: ignore[arg-type]
    return None


def _no_mask(*_: Any, **__: Any) -> None:
    """Positions and windows are the plan's business."""


def attach(model: PreTrainedModel) -> None:
    """Route every attention call of `model` through its step's plan, which also scales queries by their positions.

    Registration is idempotent.
    """
    AttentionInterface.register(ATTN_NAME, _attention)
    AttentionMaskInterface.register(ATTN_NAME, _no_mask)
    model.config._attn_implementation = ATTN_NAME
    for module in model.modules():
        if temperature_of(module) is not None:
            module.attn_temperature_tuning = False  # type: ignore[assignment]
