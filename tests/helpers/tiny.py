"""Tiny random models of every verified type, and Hugging Face's own logits for them: the tests' reference."""

# Shape legend: T tokens, V vocabulary.
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 320

# Few (head_dim, group size) pairs overall, since a decode kernel is compiled for each: (16,1) (16,2) (16,4) (32,2).
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "use_cache": False,
}


def _config(model_type: str, **fields: Any) -> Callable[..., PreTrainedConfig]:
    return lambda **overrides: CONFIG_MAPPING[model_type](**{**_COMMON, **fields, **overrides})


def _rope(rope_type: str = "default", theta: float = 10_000.0, **fields: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta, **fields}


def _alternating(*kinds: str, layers: int) -> list[str]:
    return [f"{kinds[i % len(kinds)]}_attention" for i in range(layers)]


_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": False}

TINY: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": _config("llama"),
    "llama3_scaled": _config(
        "llama",
        rope_parameters=_rope(
            "llama3",
            5e5,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=512,
        ),
    ),
    "llama_yarn": _config("llama", rope_parameters=_rope("yarn", factor=8.0, original_max_position_embeddings=512)),
    # For dynamic NTK Hugging Face reads the original length from max_position_embeddings.
    "llama_dynamic": _config("llama", max_position_embeddings=64, rope_parameters=_rope("dynamic", factor=4.0)),
    "qwen2": _config("qwen2", tie_word_embeddings=True, rope_parameters=_rope(theta=1e6)),
    "qwen3": _config("qwen3", head_dim=32, tie_word_embeddings=True, rope_parameters=_rope(theta=1e6)),
    "mistral": _config("mistral", head_dim=32, sliding_window=24),
    "gemma2": _config(
        "gemma2",
        head_dim=32,
        num_hidden_layers=4,
        layer_types=_alternating("sliding", "full", layers=4),
        sliding_window=32,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=0.5,
        tie_word_embeddings=True,
    ),
    "gemma3_text": _config(
        "gemma3_text",
        head_dim=16,
        num_key_value_heads=1,
        num_hidden_layers=6,
        layer_types=_alternating("sliding", "sliding", "sliding", "sliding", "sliding", "full", layers=6),
        sliding_window=32,
        query_pre_attn_scalar=16,
        rope_parameters={
            "full_attention": _rope("linear", 1e6, factor=8.0),
            "sliding_attention": _rope(theta=1e4),
        },
        tie_word_embeddings=True,
    ),
    # Partial rotation (12 of 16 dimensions, so 6 factors), as Phi-4-mini has it.
    "phi3_longrope": _config(
        "phi3",
        original_max_position_embeddings=64,
        rope_parameters=_rope(
            "longrope",
            partial_rotary_factor=0.75,
            original_max_position_embeddings=64,
            short_factor=[1.0, 1.05, 1.1, 1.2, 1.3, 1.5],
            long_factor=[1.0, 1.5, 3.0, 8.0, 20.0, 40.0],
        ),
    ),
    "gpt_oss": _config(
        "gpt_oss",
        head_dim=16,
        num_key_value_heads=1,
        num_hidden_layers=4,
        layer_types=_alternating("sliding", "full", layers=4),
        sliding_window=32,
        num_local_experts=4,
        rope_parameters=_rope(
            "yarn",
            150_000.0,
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=128,
        ),
        **_MOE,
    ),
    "mixtral": _config("mixtral", num_local_experts=4, sliding_window=None, **_MOE),
    "qwen3_moe": _config(
        "qwen3_moe",
        head_dim=32,
        num_experts=4,
        moe_intermediate_size=48,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        **_MOE,
    ),
    "smollm3": _config("smollm3", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], tie_word_embeddings=True),
    "granite": _config(
        "granite",
        attention_multiplier=0.11,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        logits_scaling=2.0,
    ),
    "olmo2": _config("olmo2", num_key_value_heads=4),
    # A temperature by position, which the real ones have from 8,191 on, and here from 63 on.
    "llama4_text": _config(
        "llama4_text",
        head_dim=16,
        num_hidden_layers=4,
        no_rope_layers=[1, 1, 0, 1],
        attention_chunk_size=48,
        floor_scale=64,
        attn_scale=0.5,
        intermediate_size_mlp=96,
        interleave_moe_layer_step=2,
        num_local_experts=4,
        num_experts_per_tok=1,
    ),
}


def make_tiny(
    kind: str, *, peaky: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A random model of `TINY[kind]` in eval mode, the same for the same arguments; `overrides` go to its config.

    Norm weights, biases and sinks are perturbed so that leaving one out shows. `peaky` sharpens attention (mean top
    weight over one half): query and key weights times 16, or the query norm times 4 where there is one.
    """
    config = TINY[kind](**overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _perturb(name, parameter)
            if peaky:
                for module in model.modules():
                    _sharpen(module)
    return model.to(dtype).eval().requires_grad_(False)


def _perturb(name: str, parameter: torch.Tensor) -> None:
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "sinks":
        parameter.normal_(0.0, 1.0)
    elif (parameter.ndim == 1 and "norm" in name) or "bias" in leaf:
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    elif not any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "embed", "lm_head")):
        parameter.mul_(4.0)  # the default 0.02 at this width would leave the residual stream almost untouched


def _sharpen(module: nn.Module) -> None:
    if hasattr(module, "q_norm"):
        weight, is_offset = module.q_norm.weight, type(module.q_norm).__name__.startswith("Gemma")
        weight.copy_((weight + 1.0) * 4.0 - 1.0 if is_offset else weight * 4.0)
    elif hasattr(module, "qkv_proj"):
        q_and_k = module.qkv_proj.weight.shape[0] - module.config.num_key_value_heads * module.head_dim
        module.qkv_proj.weight[:q_and_k].mul_(16.0)
    elif hasattr(module, "q_proj"):
        module.q_proj.weight.mul_(16.0)
        module.k_proj.weight.mul_(16.0)


def random_ids(num_tokens: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """`num_tokens` token ids, never one of the special ids 0 to 2; a prefix of the longer lists of the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(3, vocab, (), generator=generator)) for _ in range(num_tokens)]


def hf_logits(
    model: PreTrainedModel, ids: Sequence[int] | torch.Tensor, total_tokens: int | None = None
) -> torch.Tensor:
    """Hugging Face's logits [T, V] fp32: eager attention, one full forward, no cache, nothing of this project.

    `total_tokens` (default: T) is the number of positions the request will have: longrope and dynamic NTK are computed
    as Hugging Face would in a forward of that many tokens, by showing its rotary module the last position as one more
    row that is dropped from the answer. Needs a model whose modules nobody has swapped; it is copied, not changed.
    """
    return _forward(pristine_copy(model).float(), ids, total_tokens)


def hf_logits64(
    model: PreTrainedModel, ids: Sequence[int] | torch.Tensor, total_tokens: int | None = None
) -> torch.Tensor:
    """`hf_logits` in float64 throughout, norms and softmax too; only the rotary tables stay Hugging Face's fp32 ones.

    `(hf_logits - hf_logits64).abs().max()` is Hugging Face's own rounding error.
    """
    wide = pristine_copy(model).float()
    with float64(wide):
        return _forward(wide, ids, total_tokens)


@contextmanager
def float64(model: PreTrainedModel) -> Iterator[None]:
    """Turn `model` into doubles, and its forward with it; the rotary frequencies stay Hugging Face's fp32 ones."""
    narrow = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model.double()
    for name, buffer in narrow.items():
        owner, leaf = name.rsplit(".", 1)
        setattr(model.get_submodule(owner), leaf, buffer)
    with _Float64():
        yield


class _Float64(TorchFunctionMode):
    """Ignores the casts of doubles to fp32 that modeling code makes in norms, softmax and routers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in args[1:]):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def pristine_copy(model: PreTrainedModel) -> PreTrainedModel:
    swapped = sorted({type(m).__name__ for m in model.modules() if type(m).__module__.startswith("longctx")})
    assert not swapped, f"the reference needs an unchanged model; make a second one (found {', '.join(swapped)})"
    pristine = copy.deepcopy(model)
    pristine.config._attn_implementation = "eager"
    pristine.config._experts_implementation = "eager"
    return pristine


def _forward(model: PreTrainedModel, ids: Sequence[int] | torch.Tensor, total_tokens: int | None) -> torch.Tensor:
    ids_T = torch.as_tensor(ids, dtype=torch.int64, device=model.device).reshape(-1)
    total_tokens = len(ids_T) if total_tokens is None else total_tokens
    assert total_tokens >= len(ids_T), "a request has at least the positions it is computed at"
    with torch.no_grad(), _as_long_as(model, total_tokens):
        return model(ids_T[None], use_cache=False).logits[0]


@contextmanager
def _as_long_as(model: PreTrainedModel, total_tokens: int) -> Iterator[None]:
    def show_last_position(module: nn.Module, args: Any, kwargs: Any) -> Any:
        x, *rest = args
        positions = rest.pop(0) if rest else kwargs.pop("position_ids")
        last = positions.new_full((*positions.shape[:-1], 1), total_tokens - 1)
        return (x, torch.cat([positions, last], dim=-1), *rest), kwargs

    def drop_it(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):  # Llama 4's complex numbers
            return output[..., :-1, :]
        return tuple(table[..., :-1, :] for table in output)

    handles = []
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            handles.append(module.register_forward_pre_hook(show_last_position, with_kwargs=True))
            handles.append(module.register_forward_hook(drop_it))
    assert handles, "no rotary module found"
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
