"""Writes tiny models as GGUF files the way llama.cpp's converter does, from nothing but its published rules."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from longctx.models.empty import embedding_and_head

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    rename: Mapping[str, str] | None = None,
    drop: Collection[str] = (),
    add: Mapping[str, np.ndarray] | None = None,
    header: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    tokenizer_header: Mapping[str, Any] | None = None,
    embedding_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
) -> Path:
    """Write `model` to `path`, its embedding quantized; `round_embedding` gives a model the same rounding.

    A tied head is left out. `header` adds values under the architecture's prefix, None removes one.
    """
    config = model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**_header(config), **(header or {})}.items():
        if value is not None:
            _add(writer, f"{arch}.{key}", value)
    for key, value in (tokenizer_header or {}).items():
        _add(writer, f"tokenizer.{key}", value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        gguf_name = _gguf_name(name, config.model_type)
        if gguf_name in drop:
            continue
        values = _as_converter_stores(name, tensor.float().numpy(), config)
        kind = embedding_type if gguf_name == "token_embd.weight" else gguf.GGMLQuantizationType.F32
        writer.add_tensor((rename or {}).get(gguf_name, gguf_name), quantize(values, kind), raw_dtype=kind)
    for name, values in (add or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def round_embedding(model: PreTrainedModel, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0) -> None:
    """Give the model the embedding that its GGUF file holds."""
    weight, _ = embedding_and_head(model)
    with torch.no_grad():
        weight.copy_(torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind)))


def _header(config: Any) -> dict[str, Any]:
    ropes = config.rope_parameters
    theta = ropes["full_attention"]["rope_theta"] if "full_attention" in ropes else ropes["rope_theta"]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.sliding_window": window,
        "rope.freq_base": float(theta),
        "rope.dimension_count": int(head_dim * ropes.get("partial_rotary_factor", 1.0)),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
    }


def _gguf_name(name: str, model_type: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    names = _LAYER_NAMES | (_GEMMA_NAMES if model_type.startswith("gemma") else {})
    return f"blk.{layer}.{names[part]}.{suffix}"


def _as_converter_stores(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    if config.model_type in ("llama", "mistral") and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    return values


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    add.get(type(value), writer.add_array)(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    control = {token["content"] for token in state["added_tokens"] if token["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in control else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
