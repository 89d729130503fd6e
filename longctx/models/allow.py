"""Which model types are served: those that were verified layer by layer, and why others never can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from longctx.errors import ModelError
from longctx.models.hook import ATTN_NAME

# Each is in the test matrix against Hugging Face's eager attention.
ALLOWED = frozenset(
    {
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma2",
        "gemma3_text",
        "phi3",
        "gpt_oss",
        "mixtral",
        "qwen3_moe",
        "smollm3",
        "granite",
        "olmo2",
        "llama4_text",
    }
)

_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_STATE_FIELDS = ("mamba_d_state", "mamba_d_conv", "conv_L_cache", "state_size", "linear_conv_kernel_dim", "lru_width")
PROBE_TOKENS = 48
"""The length at which an unverified model is compared."""
_TOLERANCE = 1e-3


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The language model's config: itself, or the text part of Gemma 3's and Llama 4's picture-and-text models."""
    return config.text_config if config.model_type in ("gemma3", "llama4") else config


def check(config: PreTrainedConfig, unverified: bool = False) -> None:
    """Raise ModelError in one line when models of `config`'s type are not served; `unverified` lifts the list only."""
    reason = _never(config)
    if reason is not None:
        raise ModelError(f"models of type {config.model_type!r} cannot be served: {reason}")
    if config.model_type not in ALLOWED and not unverified:
        raise ModelError(
            f"models of type {config.model_type!r} are not verified ({', '.join(sorted(ALLOWED))} are); "
            "--unverified-model tries it and compares with Hugging Face at load"
        )


def _never(config: PreTrainedConfig) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    if getattr(config, "kv_lora_rank", None):
        return "it has latent attention (MLA), whose keys and values differ in size"
    if getattr(config, "num_kv_shared_layers", 0) or config.model_type.startswith(("gemma3n", "gemma4")):
        return "its layers share keys and values"
    if kinds - _LAYER_TYPES or any(getattr(config, name, None) is not None for name in _STATE_FIELDS):
        return "it has layers that are not attention and whose state would mix requests"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no causal language model for it"
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    if getattr(model_class, "_is_stateful", False):
        return "it has layers that are not attention and whose state would mix requests"
    if not model_class._supports_attention_backend:
        return "its attention does not go through transformers' attention interface"
    return None


def verify_against_eager(model: PreTrainedModel, run_logits: Callable[[list[int]], torch.Tensor]) -> None:
    """Compare an unverified model's logits with Hugging Face's eager attention; raise ModelError on a difference.

    `model` is hooked and otherwise as transformers made it; `run_logits(ids)` gives the engine's logits [T, V] for one
    request of those ids. The model's attention is put back to the hook before returning.
    """
    limit = min(getattr(model.config, "vocab_size", 1 << 15), 1 << 15)
    ids = torch.randint(3, limit, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
    ours_TV = run_logits(ids.tolist()).float().cpu()
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            theirs_TV = model(ids[None].to(model.device), use_cache=False).logits[0].float().cpu()
    finally:
        model.config._attn_implementation = before if before else ATTN_NAME
    allowed = _TOLERANCE * max(1.0, float(theirs_TV.abs().max()))
    if model.dtype != torch.float32:
        allowed *= 50
    if ours_TV.shape != theirs_TV.shape:
        raise ModelError(
            f"models of type {model.config.model_type!r} cannot be served: logits have shape {tuple(ours_TV.shape)}, "
            f"Hugging Face's {tuple(theirs_TV.shape)}"
        )
    worst = float((ours_TV - theirs_TV).abs().max())
    if not worst <= allowed:  # NaN is a difference too
        raise ModelError(
            f"models of type {model.config.model_type!r} cannot be served: logits differ from Hugging Face's by "
            f"{worst:.3g}, allowed are {allowed:.3g}"
        )
