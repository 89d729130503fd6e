"""A model's geometry from its config: equal to what Hugging Face's own forward does, layer by layer."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, LlamaConfig, PreTrainedModel
from transformers.masking_utils import chunked_causal_mask_function
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import eager_attention_forward

from longctx.attention.reach import Reach
from longctx.errors import ModelError
from longctx.models.inspect import _mask_of, resolve_dtype, spec_from_config
from longctx.models.limits import apply_limits, rope_spec
from longctx.models.spec import RopeSpec
from tests.helpers.tiny import TINY, make_tiny, random_ids

TOKENS = 50


def windows_of_masks(model: PreTrainedModel) -> list[int | None]:
    """How many keys the last of TOKENS queries sees in each layer, by the masks of Hugging Face's eager forward."""
    seen: list[int | None] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        visible = int((kwargs["attention_mask"][0, 0, -1] == 0).sum())
        seen.append(None if visible == TOKENS else visible)

    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "o_proj"):
            module.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(torch.tensor([random_ids(TOKENS)]), use_cache=False)
    return seen


MATRIX: list[tuple[str, dict[str, Any], list[int | None]]] = [
    ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, [None, None]),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, [None, 16]),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, [16, 16]),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16}, [None, None]),  # max_window_layers is 28
    (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        [16, None],
    ),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, [None, 16]),
    ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 16}, [None, None]),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}, [16, 16]),
    ("mistral", {"sliding_window": None}, [None, None]),
    ("mistral", {"sliding_window": 24}, [24, 24]),
    ("mixtral", {"sliding_window": 8}, [8, 8]),
    ("phi3_longrope", {"sliding_window": 40}, [40, 40]),
    ("gemma2", {}, [32, None, 32, None]),
    ("gemma3_text", {}, [32] * 5 + [None]),
    ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 3}, [32, 32, None, 32, 32, None]),
    ("gpt_oss", {}, [32, None, 32, None]),
    ("smollm3", {"use_sliding_window": False, "sliding_window": 16}, [None] * 4),
]


@pytest.mark.parametrize(("kind", "overrides", "expected"), MATRIX)
def test_windows_are_those_of_the_masks(kind: str, overrides: dict[str, Any], expected: list[int | None]) -> None:
    """B36: a window on the wrong layers, or although switched off (huggingface/transformers#35896,
    InternLM/lmdeploy#3614, vllm-project/vllm#17772)."""
    model = make_tiny(kind, **overrides)
    windows = [layer.window for layer in spec_from_config(model.config, kind).layers]
    assert windows == expected
    assert windows == windows_of_masks(model)


@pytest.mark.parametrize("chunk", [1, 2, 16, 48, 8192])
def test_local_chunks_are_those_of_the_masks(chunk: int) -> None:
    """Llama 4: chunks where it rotates, full attention with a temperature by position where it does not."""
    layers = spec_from_config(TINY["llama4_text"](attention_chunk_size=chunk), "tiny").layers
    local = Reach(1) if chunk == 1 else Reach(local_chunk=chunk)  # the same
    assert [layer.reach for layer in layers] == [local, local, Reach(), local]
    assert [layer.temperature for layer in layers] == [None, None, (64, 0.5), None]


@pytest.mark.parametrize("kind", TINY)
def test_layers_are_as_their_modules_call_the_hook(kind: str) -> None:
    """Head sizes, scale, soft-cap, window and sink are the ones that arrive in the attention function."""
    model = make_tiny(kind)
    calls: list[dict[str, Any]] = []

    def note(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        calls.append({"q": query.shape, "k": key.shape, "v": value.shape, "index": module.layer_idx, **kwargs})
        kwargs.pop("sliding_window", None)
        return eager_attention_forward(module, query, key, value, mask, **kwargs)

    spec = spec_from_config(model.config, kind)
    AttentionInterface.register("test_note", note)
    model.config._attn_implementation = "test_note"
    with torch.no_grad():
        model(torch.tensor([random_ids(4)]), use_cache=False)
    assert len(calls) == spec.num_layers == len(spec.layers)
    for layer, call in zip(spec.layers, calls, strict=True):
        assert call["index"] == layer.index
        assert call["q"][1] == layer.num_heads
        assert (call["k"][1], call["k"][3]) == (layer.num_kv_heads, layer.k_dim)
        assert (call["v"][1], call["v"][3]) == (layer.num_kv_heads, layer.v_dim)
        assert call["scaling"] == pytest.approx(layer.scale)
        assert call.get("sliding_window") == layer.window
        assert call.get("softcap") == layer.softcap
        assert (call.get("s_aux") is not None) == layer.has_sink


@pytest.mark.parametrize("kind", TINY)
def test_parameters_are_counted_once(kind: str) -> None:
    model = make_tiny(kind)
    spec = spec_from_config(model.config, kind)
    assert spec.num_params == sum(p.numel() for p in model.parameters())
    assert spec.embedding_params == spec.head_params == 320 * 64
    assert spec.tied == model.config.tie_word_embeddings
    vectors = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 1)
    assert spec.num_params == spec.linear_params + vectors + 320 * 64 * (1 if spec.tied else 2)
    experts = ("mixtral", "qwen3_moe", "gpt_oss", "llama4_text")
    assert (spec.active_linear_params < spec.linear_params) == (kind in experts)


def test_active_parameters_of_experts() -> None:
    spec = spec_from_config(TINY["mixtral"](), "tiny")
    attention, router, expert = 64 * 64 * 2 + 64 * 32 * 2, 64 * 4, 3 * 64 * 96
    assert spec.linear_params == 2 * (attention + router + 4 * expert)
    assert spec.active_linear_params == 2 * (attention + router + 2 * expert)


def test_70b_from_its_config_alone() -> None:
    """Seconds and little memory: no weight is ever made."""
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    )
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    spec = spec_from_config(config, "70b")
    assert spec.num_params == 70_553_706_496
    assert (spec.layers[79].num_kv_heads, spec.layers[79].k_dim, spec.max_positions) == (8, 128, 131072)
    assert time.monotonic() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_inspecting_leaves_the_config_as_it_was() -> None:
    model = make_tiny("gemma3_text")
    before = model.config.to_json_string(use_diff=False)
    spec_from_config(model.config, "tiny", max_model_len=100)
    assert model.config.to_json_string(use_diff=False) == before
    assert model.config._attn_implementation == "eager"


def test_other_masks_and_shapes_are_refused() -> None:
    """What slips through an unverified type is noticed in its masks and modules."""
    with pytest.raises(ModelError, match="neither causal nor a sliding window nor a local chunk"):
        _mask_of(lambda batch, head, query, key: (key <= query) & ((query - key) % 2 == 0))
    with pytest.raises(ModelError, match="neither causal nor a sliding window nor a local chunk"):
        _mask_of(chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64)), local_size=8)
    latent = CONFIG_MAPPING["deepseek_v3"](num_hidden_layers=1, vocab_size=64, hidden_size=64, first_k_dense_replace=1)
    with pytest.raises(ModelError, match="exactly one attention"):
        spec_from_config(latent, "deepseek")
    with pytest.raises(ModelError, match="does not describe a model"):
        spec_from_config(TINY["llama"](hidden_act="no-such-function"), "broken")


def test_dtype() -> None:
    config = TINY["llama"](dtype="bfloat16")
    assert resolve_dtype(config, "auto", "cpu") == "float32"
    assert resolve_dtype(config, "auto", "cuda:0") == "bfloat16"
    assert resolve_dtype(config, "bf16") == resolve_dtype(config, "bfloat16") == "bfloat16"
    assert resolve_dtype(TINY["llama"](dtype=None), "auto", "cuda") == "float32"
    with pytest.raises(ModelError, match="float32, bfloat16, float16"):
        resolve_dtype(config, "int4")


def test_gemma_in_float16_is_refused() -> None:
    """B137: activations beyond 65,504 (huggingface/transformers#36822, #36832, #39972)."""
    config = TINY["gemma3_text"](dtype="float16")
    with pytest.raises(ModelError, match="--dtype bfloat16 or float32"):
        spec_from_config(config, "gemma", dtype="float16")
    assert resolve_dtype(config, "auto", "cuda") == "bfloat16"


def test_rope_regimes_and_positions() -> None:
    assert rope_spec(TINY["llama_yarn"]()) == rope_spec(TINY["gemma3_text"]()) == RopeSpec()
    assert rope_spec(TINY["phi3_longrope"]()) == RopeSpec("longrope", 64)
    assert rope_spec(TINY["llama_dynamic"]()) == RopeSpec("dynamic", 64)
    assert spec_from_config(TINY["llama_dynamic"](), "tiny").max_positions == 256
    yarn = TINY["llama_yarn"](max_position_embeddings=512)  # as Qwen's instructions leave it
    assert spec_from_config(yarn, "tiny").max_positions == 4096


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_scaling_goes_beyond_the_models_positions(kind: str) -> None:
    config = TINY["llama"]()
    scaled, positions = apply_limits(config, 16384, kind)
    assert positions == scaled.max_position_embeddings == 16384
    assert (scaled.rope_parameters["rope_type"], scaled.rope_parameters["factor"]) == (kind, 4.0)
    assert config.rope_parameters["rope_type"] == "default" and config.max_position_embeddings == 4096
    if kind == "yarn":
        assert scaled.rope_parameters["original_max_position_embeddings"] == 4096
    spec = spec_from_config(config, "tiny", max_model_len=16384, rope_scaling=kind)
    assert spec.max_positions == 16384 and spec.rope == RopeSpec()


def test_scaling_of_gemma3_is_for_global_layers() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    config = TINY["gemma3_text"](
        rope_parameters={"full_attention": {**plain, "rope_theta": 1e6}, "sliding_attention": plain}
    )
    scaled, _ = apply_limits(config, 8192, "linear")
    assert scaled.rope_parameters["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}
    assert scaled.rope_parameters["sliding_attention"] == config.rope_parameters["sliding_attention"]


def test_a_shorter_limit_changes_nothing_else() -> None:
    config = TINY["llama"]()
    assert apply_limits(config, 1000, None) == (config, 1000)


@pytest.mark.parametrize(
    ("kind", "length", "scaling", "message"),
    [
        ("llama", 8192, None, "has 4096 positions, not 8192; add --rope-scaling yarn"),
        ("llama", 8192, "ntk", "'ntk' is not known; choose one of yarn, linear"),
        ("llama", None, "yarn", "needs --max-model-len"),
        ("llama", 4096, "yarn", "need no rope scaling"),
        ("llama", 0, None, "at least 1"),
        ("llama_yarn", 8192, "yarn", "already scaled"),
        ("phi3_longrope", 8192, "linear", "already scaled"),
        ("gemma3_text", 8192, "linear", "already scaled"),
    ],
)
def test_impossible_limits(kind: str, length: int | None, scaling: str | None, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        spec_from_config(TINY[kind](), "tiny", max_model_len=length, rope_scaling=scaling)
    assert "\n" not in str(caught.value)
