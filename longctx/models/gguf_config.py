"""From a GGUF header to a Hugging Face config, including what the header leaves to the reader's knowledge."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from transformers import AutoConfig, PreTrainedConfig

from longctx.errors import ModelError
from longctx.models.gguf_reader import GGUFFile

# GGUF architecture -> model_type. Mistral files call themselves llama; a window in the header tells them apart.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
# Tensors that carry rope factors and no weights; they go into the config.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# A turn's end by its usual spellings, for files whose header names only the document's end.
_TURN_ENDS = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>", "<|eom_id|>")
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")

# llama.cpp knows these sizes by their layer count: their attention scale is by hidden size, not by head size.
_SCALE_BY_HIDDEN = {("gemma2", 46), ("gemma3", 62)}


def config_from_gguf(file: GGUFFile) -> PreTrainedConfig:
    """The config of a GGUF model. Raises ModelError naming what the file has and this reader does not know."""
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} has the GGUF architecture {architecture!r}; {', '.join(ARCHITECTURES)} can be read: "
            "use the model's safetensors folder"
        )
    if file.get("expert_count"):
        raise ModelError(f"{file.path} is a mixture of experts, whose GGUF cannot be read; use its safetensors folder")
    try:
        values = _common(file)
        values |= {"gemma2": _gemma2, "gemma3": _gemma3, "phi3": _phi3}.get(architecture, _llama_like)(file, values)
    except (KeyError, TypeError) as error:
        raise ModelError(f"{file.path} lacks the header value {error}; the file is incomplete") from error
    return AutoConfig.for_model(**values)


def stop_ids(file: GGUFFile) -> list[int]:
    """Every id that ends a generation: the header's EOS, EOT and EOM, and the turn's end that the template writes."""
    ids: set[int] = set()
    for key in _STOP_KEYS:
        value = file.metadata.get(f"tokenizer.ggml.{key}")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    template = file.metadata.get("tokenizer.chat_template", "")
    ends = [end for end in _TURN_ENDS if end in template]
    if ends:
        tokens = file.metadata.get("tokenizer.ggml.tokens", [])
        ids.update(index for index, token in enumerate(tokens) if token in ends)
    return sorted(int(i) for i in ids)


def _common(file: GGUFFile) -> dict[str, Any]:
    heads, hidden = _need(file, "attention.head_count"), _need(file, "embedding_length")
    head_dim = file.get("attention.key_length") or hidden // heads
    if file.get("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path} has key and value heads of different size, which no supported model has")
    token = {name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")}
    return {
        "model_type": ARCHITECTURES[file.architecture],
        "hidden_size": hidden,
        "intermediate_size": _need(file, "feed_forward_length"),
        "num_hidden_layers": _need(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _need(file, "context_length"),
        "rms_norm_eps": _need(file, "attention.layer_norm_rms_epsilon"),
        "vocab_size": _embedding(file).shape[0],
        "tie_word_embeddings": _is_tied(file),
        "bos_token_id": token["bos"],
        "eos_token_id": token["eos"],
        "pad_token_id": token["padding"],
        "rope_parameters": _rope(file, head_dim),
        "dtype": "float32",
    }


def _need(file: GGUFFile, key: str) -> Any:
    value = file.get(key)
    if value is None:
        raise KeyError(f"{file.architecture}.{key}")
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ModelError(f"{file.path} has layers that differ in {key}, which no supported model has")
        return value[0]
    return value


def _embedding(file: GGUFFile) -> Any:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} lacks the tensor 'token_embd.weight'; the file is incomplete")
    return file.tensors["token_embd.weight"]


def _is_tied(file: GGUFFile) -> bool:
    """No output weight means tied, by the format's rule; an equal copy of the embedding is tied as well."""
    output, embedding = file.tensors.get("output.weight"), _embedding(file)
    if output is None:
        return True
    if (output.kind, output.shape) != (embedding.kind, embedding.shape):
        return False
    ours, theirs = (np.memmap(file.path, np.uint8, "r", t.start, (t.num_bytes,)) for t in (output, embedding))
    return bool(np.array_equal(ours, theirs))


def _rope(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base", 10000.0))}
    kind = file.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(_need(file, "rope.scaling.factor"))}
    elif kind not in ("none", "longrope"):
        raise ModelError(f"{file.path} has rope scaling {kind!r}; none, linear, yarn and longrope can be read")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = _need(file, "rope.scaling.original_context_length")
    if "rope_freqs.weight" in file.tensors:
        rope |= _llama3_rope(file, rope["rope_theta"], head_dim)
    return rope


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The Llama 3.1 scaling whose factors the file spells out; its four numbers are not in the header."""
    factors = file.read_tensor("rope_freqs.weight").astype(np.float64)
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (original / wavelength - low) / (high - low)
    blended = 1 / ((1 - smooth) / factor + smooth)
    expected = np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, blended))
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ModelError(f"{file.path} has rope factors that are not Llama 3's; use the model's safetensors folder")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _llama_like(file: GGUFFile, common: dict[str, Any]) -> dict[str, Any]:
    rotated = file.get("rope.dimension_count", common["head_dim"])
    if rotated != common["head_dim"]:
        raise ModelError(
            f"{file.path} rotates {rotated} of {common['head_dim']} head dimensions, which is not supported"
        )
    window = file.get("attention.sliding_window")
    if file.architecture == "llama" and window:
        return {"model_type": "mistral", "sliding_window": window}
    if file.architecture != "llama":
        return {"use_sliding_window": False}
    has = {
        name: any(re.fullmatch(rf"blk\.\d+\.{name}\.bias", t) for t in file.tensors) for name in ("attn_q", "ffn_up")
    }
    return {"attention_bias": has["attn_q"], "mlp_bias": has["ffn_up"]}


def _gemma_scale(file: GGUFFile, common: dict[str, Any]) -> float:
    by_hidden = (file.architecture, common["num_hidden_layers"]) in _SCALE_BY_HIDDEN
    return common["hidden_size"] // common["num_attention_heads"] if by_hidden else common["head_dim"]


def _gemma2(file: GGUFFile, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gemma_scale(file, common),
        "sliding_window": file.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GGUFFile, common: dict[str, Any]) -> dict[str, Any]:
    """Five sliding layers to one global, and a local theta of 10,000: neither is in the header of most files."""
    pattern = int(file.get("attention.sliding_window_pattern", 6))
    kinds = [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(common["num_hidden_layers"])
    ]
    global_rope = common["rope_parameters"]
    if "gemma3.rope.freq_base" not in file.metadata:
        global_rope = global_rope | {"rope_theta": 1_000_000.0}
    local_rope = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base_swa", 10_000.0))}
    return {
        "query_pre_attn_scalar": _gemma_scale(file, common),
        "sliding_window": file.get("attention.sliding_window", 512),
        "layer_types": kinds,
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "rope_parameters": {"full_attention": global_rope, "sliding_attention": local_rope},
    }


def _phi3(file: GGUFFile, common: dict[str, Any]) -> dict[str, Any]:
    rope = dict(common["rope_parameters"])
    rope["partial_rotary_factor"] = file.get("rope.dimension_count", common["head_dim"]) / common["head_dim"]
    original = file.get("rope.scaling.original_context_length", common["max_position_embeddings"])
    if "rope_factors_long.weight" in file.tensors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": file.read_tensor("rope_factors_long.weight").tolist(),
            "short_factor": file.read_tensor("rope_factors_short.weight").tolist(),
            "original_max_position_embeddings": original,
        }
    return {
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        "sliding_window": file.get("attention.sliding_window"),
    }
