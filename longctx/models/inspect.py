"""A model's geometry from its config alone, read off Hugging Face's own modules and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from longctx.attention.reach import Reach
from longctx.errors import ModelError
from longctx.models.empty import embedding_and_head, empty_model
from longctx.models.hook import temperature_of
from longctx.models.int8_codes import int8_bytes
from longctx.models.limits import apply_limits, rope_spec
from longctx.models.spec import DTYPE_BYTES, INT8_WEIGHTS, PLAIN_WEIGHTS, LayerSpec, ModelSpec, check_weights

_PROBE_NAME = "longctx_probe"
_FAR = 1 << 40  # a position beyond any window
_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}
# Their activations exceed float16's largest value, 65,504.
_OVERFLOWS_FLOAT16 = ("gemma2", "gemma3")


def resolve_dtype(config: PreTrainedConfig, dtype: str = "auto", device: str = "cpu") -> str:
    """The dtype's name: "auto" is float32 on a CPU and the config's own dtype elsewhere.

    On a CPU always float32: 16-bit matmuls were measured at a tenth of its speed, with and without bf16 instructions.
    Raises ModelError for an unknown name, and for float16 where the model's activations exceed its range.
    """
    name = _ALIASES.get(dtype, dtype)
    overflows = config.model_type.startswith(_OVERFLOWS_FLOAT16)
    if name == "auto":
        if device.startswith("cpu"):
            return "float32"
        own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        if own == "float16" and overflows:
            return "bfloat16"
        return own if own in DTYPE_BYTES else "bfloat16"
    if name not in DTYPE_BYTES:
        raise ModelError(f"dtype {dtype!r} is not known; choose auto, {', '.join(DTYPE_BYTES)}")
    if name == "float16" and overflows:
        raise ModelError(
            f"{config.model_type} overflows in float16 (its activations exceed 65504); use --dtype bfloat16 or float32"
        )
    return name


def spec_from_config(
    config: PreTrainedConfig,
    name: str,
    dtype: str = "auto",
    max_model_len: int | None = None,
    rope_scaling: str | None = None,
    device: str = "cpu",
    weights: str = "auto",
) -> ModelSpec:
    """The `ModelSpec` of a config, in seconds and without memory for weights. Raises ModelError.

    Every attention module says its head sizes, scale, soft-cap and sink; windows and chunks are those of the masks that
    Hugging Face's own forward would give each layer, whatever the config's fields are called.
    """
    check_weights(weights)
    config, max_positions = apply_limits(config, max_model_len, rope_scaling)
    model = empty_model(config)
    reaches = _reaches(model)
    layers = tuple(
        _layer(index, module, reach)
        for index, (module, reach) in enumerate(zip(_decoder(model).layers, reaches, strict=True))
    )
    embedding, head = embedding_and_head(model)
    linear, active = _linear_params(model)
    resolved = resolve_dtype(config, dtype, device)
    if weights == INT8_WEIGHTS and (resolved != "float32" or not device.startswith("cpu")):
        raise ModelError(f"--weights int8 is for float32 on a CPU, not {resolved} on {device}: leave it out")
    int8_shapes = [tuple(m.weight.shape) for m in model.modules() if type(m) is nn.Linear]
    return ModelSpec(
        name=name,
        model_type=config.model_type,
        dtype=resolved,
        num_layers=len(layers),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=max_positions,
        layers=layers,
        rope=rope_spec(config),
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        embedding_params=embedding.numel(),
        head_params=head.numel(),
        linear_params=linear,
        active_linear_params=active,
        tied=head is embedding,
        weights=INT8_WEIGHTS if weights == INT8_WEIGHTS else PLAIN_WEIGHTS,
        int8_params=sum(rows * columns for rows, columns in int8_shapes),
        int8_bytes=sum(int8_bytes(rows, columns) for rows, columns in int8_shapes),
    )


def _decoder(model: PreTrainedModel) -> Any:
    decoder = model.get_decoder()
    if decoder is model:  # Llama 4 names another prefix than the one its decoder has
        decoder = getattr(model, "model", model)
    if not hasattr(decoder, "layers"):
        raise ModelError(f"models of type {model.config.model_type!r} have no list of layers that can be read")
    return decoder


def _layer(index: int, layer: nn.Module, reach: Reach) -> LayerSpec:
    found = [m for m in layer.modules() if hasattr(m, "layer_idx") and (hasattr(m, "k_proj") or hasattr(m, "qkv_proj"))]
    if len(found) != 1 or found[0].layer_idx != index:
        raise ModelError(f"layer {index} ({type(layer).__name__}) does not have exactly one attention that can be read")
    module: Any = found[0]
    head_dim, config = module.head_dim, module.config
    if hasattr(module, "qkv_proj"):
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        v_width, rest = head_dim * kv_heads, module.qkv_proj.out_features - head_dim * (heads + 2 * kv_heads)
    else:
        heads, rest = divmod(module.q_proj.out_features, head_dim)
        kv_heads, more = divmod(module.k_proj.out_features, head_dim)
        v_width, rest = module.v_proj.out_features, rest + more
    if rest or kv_heads == 0 or heads % kv_heads or v_width != kv_heads * head_dim:
        raise ModelError(f"layer {index} has projections that are not heads of {head_dim}; keys and values must agree")
    # Gemma 3 carries the attribute and does not use it; Gemma 2 passes it on.
    softcap = getattr(module, "attn_logit_softcapping", None) if config.model_type != "gemma3_text" else None
    return LayerSpec(
        index=index,
        window=reach.window,
        num_heads=heads,
        num_kv_heads=kv_heads,
        k_dim=head_dim,
        v_dim=head_dim,
        scale=float(module.scaling),
        softcap=softcap,
        has_sink=getattr(module, "sinks", None) is not None,
        local_chunk=reach.local_chunk,
        temperature=temperature_of(module),
    )


def _reaches(model: PreTrainedModel) -> list[Reach]:
    """What each layer sees, by a forward in which a layer does nothing but note the mask it is given."""
    seen: list[Reach] = []

    def note(hidden_states: torch.Tensor, *_: Any, attention_mask: Any = None, **__: Any) -> torch.Tensor:
        seen.append(Reach() if attention_mask is None else attention_mask.reach)
        return hidden_states

    decoder, config = _decoder(model), model.config
    before, final_norm = config._attn_implementation, decoder.norm
    AttentionMaskInterface.register(_PROBE_NAME, _mask_of)
    config._attn_implementation = _PROBE_NAME
    decoder.norm = nn.Identity()
    for layer in decoder.layers:
        layer.forward = note
    try:
        decoder(inputs_embeds=torch.zeros(1, 2, config.hidden_size), use_cache=False)
    except ModelError:
        raise
    except Exception as error:  # an unverified model may do anything here
        raise ModelError(
            f"the masks of a {config.model_type!r} model cannot be read: {' '.join(str(error).split())}"
        ) from error
    finally:
        config._attn_implementation, decoder.norm = before, final_norm
        for layer in decoder.layers:
            del layer.forward
    return seen


class _Mask(torch.Tensor):
    """Stands for the mask of a layer; carries what it lets through past Hugging Face's forward."""

    reach: Reach


def _mask_of(mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> _Mask:
    """A mask function for `AttentionMaskInterface`: finds its rule by asking which keys far positions see."""

    def sees(query: int, key: int) -> bool:
        zero = torch.zeros((), dtype=torch.int64)
        return bool(mask_function(zero, zero, zero + query, zero + key))

    def agrees(reach: Reach) -> bool:
        """At a chunk's last query and the next one, where a window and a chunk of one size part."""
        last = _FAR - 1 if local_size is None else _FAR // local_size * local_size - 1
        return all(
            sees(query, query)
            and not sees(query, query + 1)
            and sees(query, reach.first(query))
            and (reach.first(query) == 0 or not sees(query, reach.first(query) - 1))
            for query in (last, last + 1, last + 2)
        )

    rules = (Reach(),) if local_size is None else (Reach(local_size), Reach(local_chunk=local_size))
    reach = next((rule for rule in rules if agrees(rule)), None)
    if reach is None:
        raise ModelError(
            "a layer's mask is neither causal nor a sliding window nor a local chunk; such models are not supported"
        )
    mask = torch.zeros(0).as_subclass(_Mask)
    mask.reach = reach
    return mask


def _linear_params(model: PreTrainedModel) -> tuple[int, int]:
    """Matrix parameters in the layers: all of them, and those that one token touches."""
    total = active = 0
    per_token = getattr(model.config, "num_experts_per_tok", None) or 1
    counted: set[int] = set()
    for module in _decoder(model).layers.modules():
        is_experts = type(module).__name__.endswith("Experts")
        for parameter in module.parameters(recurse=False):
            if parameter.ndim < 2 or id(parameter) in counted:
                continue
            counted.add(id(parameter))
            total += parameter.numel()
            active += parameter.numel() * per_token // parameter.shape[0] if is_experts else parameter.numel()
    return total, active
