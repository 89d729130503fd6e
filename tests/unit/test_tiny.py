"""The reference itself: every tiny model feels each of its peculiarities, and the reference leaves it unchanged."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.tiny import TINY, hf_logits, hf_logits64, make_tiny, random_ids

CLEAR = 1e-3  # ten times the tolerance of the exactness tests


def _moved(kind: str, num_tokens: int = 100, **overrides: object) -> torch.Tensor:
    ids = random_ids(num_tokens)
    return (hf_logits(make_tiny(kind), ids) - hf_logits(make_tiny(kind, **overrides), ids)).abs().amax(-1)


@pytest.mark.parametrize("peaky", [False, True])
@pytest.mark.parametrize("kind", TINY)
def test_reference_is_accurate_and_repeatable(kind: str, peaky: bool) -> None:
    ids = random_ids(100)
    logits = hf_logits(make_tiny(kind, peaky=peaky), ids)
    assert logits.shape == (100, 320) and logits.isfinite().all()
    assert torch.equal(logits, hf_logits(make_tiny(kind, peaky=peaky), ids))
    error = (logits - hf_logits64(make_tiny(kind, peaky=peaky), ids)).abs().max()
    assert 0 < error < 3e-5
    assert not torch.equal(logits, hf_logits(make_tiny(kind, peaky=peaky, seed=1), ids))


@pytest.mark.parametrize("kind", TINY)
def test_a_far_token_is_seen_unless_windows_forbid_it(kind: str) -> None:
    ids = random_ids(100)
    other = [ids[0] - 1 if ids[0] > 3 else ids[0] + 1, *ids[1:]]
    moved = (hf_logits(make_tiny(kind), ids) - hf_logits(make_tiny(kind), other)).abs().amax(-1)
    reach = 2 * (24 - 1) if kind == "mistral" else 99
    assert moved[: reach + 1].min() > CLEAR
    assert moved[reach + 1 :].sum() == 0


@pytest.mark.parametrize(("kind", "window"), [("mistral", 24), ("gemma2", 32), ("gemma3_text", 32), ("gpt_oss", 32)])
def test_a_window_off_by_one_shows_from_the_first_hidden_key_on(kind: str, window: int) -> None:
    for changed, first in ((window - 1, window - 1), (window + 1, window)):
        moved = _moved(kind, sliding_window=changed)
        assert moved[:first].max() == 0
        assert moved[first] > CLEAR


@pytest.mark.parametrize(
    ("kind", "override"),
    [
        ("llama3_scaled", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("llama_yarn", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("llama_dynamic", {"max_position_embeddings": 128}),
        ("phi3_longrope", {"original_max_position_embeddings": 128}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 32}),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 6}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
        ("granite", {"attention_multiplier": 0.25}),
        ("granite", {"residual_multiplier": 1.0}),
    ],
)
def test_config_peculiarities_show(kind: str, override: dict[str, object]) -> None:
    ids = random_ids(100)
    there, without = (hf_logits(make_tiny(kind, peaky=True, **fields), ids) for fields in ({}, override))
    assert (there - without).abs().max() > CLEAR


@pytest.mark.parametrize(
    ("kind", "part"), [(kind, "norm") for kind in TINY] + [("qwen2", "bias"), ("gpt_oss", "bias"), ("gpt_oss", "sinks")]
)
def test_norms_biases_and_sinks_show(kind: str, part: str) -> None:
    model, ids = make_tiny(kind), random_ids(40)
    before = hf_logits(model, ids)
    for name, parameter in model.named_parameters():
        if part in name:
            parameter.fill_(0.0 if part != "norm" or kind.startswith("gemma") else 1.0)
    assert (before - hf_logits(model, ids)).abs().max() > CLEAR


@pytest.mark.parametrize("kind", ["phi3_longrope", "llama_dynamic"])
def test_total_tokens_gives_the_regime_of_the_longer_forward(kind: str) -> None:
    model, ids = make_tiny(kind, peaky=True), random_ids(100)
    as_prefix = hf_logits(model, ids)[:40]
    torch.testing.assert_close(hf_logits(model, ids[:40], total_tokens=100), as_prefix, rtol=0, atol=2e-5)
    assert (hf_logits(model, ids[:40]) - as_prefix).abs().max() > CLEAR


def test_the_model_is_not_changed() -> None:
    model = make_tiny("llama_dynamic")
    model.config._attn_implementation = "sdpa"
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hf_logits64(model, random_ids(100))
    assert model.config._attn_implementation == "sdpa"
    assert model.model.rotary_emb.max_seq_len_cached == 64
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
