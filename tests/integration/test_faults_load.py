"""Fault cases of loaded models that only show in a running engine: where generation ends, and 16-bit overflow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longctx.build import build_engine
from longctx.config import EngineConfig
from longctx.engine import Engine
from longctx.errors import LongctxError
from longctx.params import SamplingParams
from tests.helpers.engine import LogitTap, generate, make_engine, run_all, score_all
from tests.helpers.scripted import dictate
from tests.helpers.tiny import hf_logits, make_tiny, random_ids
from tests.helpers.tokenizers import byte_level_tokenizer


def built(folder: Path, **options: object) -> Engine:
    return build_engine(EngineConfig.from_options(str(folder), kv_memory=32 << 20, block_tokens=16, **options))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "model"


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_generation_ends_at_every_eos_and_nowhere_else(
    folder: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B138: a list of ids is lost in an override, or another family's is used (vllm-project/vllm#45591,
    mlc-ai/mlc-llm#3191).

    The generation config says 1 and 106, the config 1, the tokenizer another; a request's own temperature loses none.
    """
    model = make_tiny("llama", eos_token_id=1)
    model.generation_config.eos_token_id = [1, 106]
    model.save_pretrained(folder)
    tokenizer = byte_level_tokenizer.__wrapped__()
    tokenizer.eos_token = "z"
    tokenizer.save_pretrained(folder)
    engine = built(folder)
    for last, ends in ((1, True), (106, True), (tokenizer.eos_token_id, True), (107, False), (198, False)):
        dictate(monkeypatch, lambda row, last=last: last if row.start + row.n - 4 == 2 else 50)
        for ignore in (False, True):
            params = SamplingParams(max_tokens=6, temperature=temperature, ignore_eos=ignore)
            request = engine.add(random_ids(4), params)
            event = run_all(engine)[request.id]
            if ends and not ignore:
                assert (event.reason, event.token_ids) == ("stop", (50, 50, last))
            else:
                assert (event.reason, len(event.token_ids)) == ("length", 6)


def test_large_activations_are_refused_in_fp16_and_exact_in_the_others(folder: Path) -> None:
    """B137: Gemma 3 in float16 answers NaN or nothing (huggingface/transformers#36822, #36832, #39972)."""
    model = make_tiny("gemma3_text")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(1).mul_(50).sub_(1)
    model.save_pretrained(folder)
    with pytest.raises(LongctxError, match="--dtype bfloat16 or float32"):
        built(folder, dtype="float16")
    ids = random_ids(60)
    for dtype in ("float32", "bfloat16"):
        engine = built(folder, dtype=dtype)
        [scores] = score_all(engine, [ids])
        assert torch.as_tensor(scores).isfinite().all()
        assert generate(engine, ids, 4, ignore_eos=True).reason == "length"


def test_keys_and_values_beyond_fp16_are_kept_finite() -> None:
    """B137: fp16 keys and values are clamped, never infinite (huggingface/transformers#36822, #36832, #39972)."""
    model = make_tiny("gemma3_text")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(1).mul_(1e6).sub_(1)
    engine = make_engine(model, kv_format="fp16", poison=None)
    tap = LogitTap(engine)
    ids = random_ids(60)
    request = engine.add(ids, SamplingParams(max_tokens=4, ignore_eos=True))
    run_all(engine)
    assert request.num_output_tokens == 4 and tap.of(request).isfinite().all()
    _, kv = engine.runner.storage.layer(5)
    assert kv.k[1:4].abs().max() == 65504


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_head_sizes_are_read_not_derived(kind: str, folder: Path) -> None:
    """B135: hidden 60, 4 heads of 16 (ggml-org/llama.cpp#8604, #8922, InternLM/lmdeploy#2761, mistral.rs#1118)."""
    options = {"query_pre_attn_scalar": 100} if kind == "gemma3_text" else {}
    model = make_tiny(kind, peaky=True, hidden_size=60, head_dim=16, **options)
    model.save_pretrained(folder)
    engine = built(folder)
    ids = random_ids(70)
    assert (torch.as_tensor(score_all(engine, [ids])[0]) - hf_logits(model, ids)).abs().max() <= 1e-4
    assert engine.loaded.spec.layers[0].scale == (0.1 if kind == "gemma3_text" else 0.25)
