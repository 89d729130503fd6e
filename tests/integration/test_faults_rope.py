"""Fault cases of rope: 16-bit phases, bases that change with the length, and scaling of one kind of layer only."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from longctx.params import SamplingParams
from tests.helpers.engine import LogitTap, generate, make_engine, run_all, score_all
from tests.helpers.tiny import hf_logits, make_tiny, random_ids


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "phi3_longrope", "llama_dynamic"])
def test_a_bf16_model_has_fp32_phases_in_the_engine(kind: str) -> None:
    """B81: positions or frequencies in 16 bits (huggingface/transformers#29285, #25681, #29496,
    huggingface/candle#3520).

    The engine's own rotary modules, after everything that building an engine does to a model: cos and sin at four far
    positions against float64, and fp32 frequencies.
    """
    model = make_tiny(kind, dtype=torch.bfloat16)
    engine = make_engine(model)
    assert engine.runner._model.dtype == torch.bfloat16
    [rotary] = engine.runner._rotaries
    positions = torch.tensor([255, 4097, 15_962, 131_071])
    for layer_type in ["full_attention", "sliding_attention"] if kind == "gemma3_text" else [None]:
        frequencies = rotary.frequencies(0, layer_type)
        assert frequencies.dtype == torch.float32
        rotary.regimes = torch.zeros(4, dtype=torch.int64)
        cos, sin = rotary(torch.empty(0, dtype=torch.bfloat16), positions[None], layer_type)
        # cos 0 is 1: what stands there is the attention scale of longrope.
        scale = rotary(torch.empty(0), torch.zeros(1, 4, dtype=torch.int64), layer_type)[0][0, 0, 0].item()
        phases = (positions[:, None].float() * frequencies).double()
        for table, exact in ((cos, phases.cos()), (sin, phases.sin())):
            assert (table[0, :, : phases.shape[1]].double() / scale - exact).abs().max() <= 0.005


def test_a_bf16_models_logits_far_out() -> None:
    """B81: the same in logits, at positions from 1,000 on, where casting a whole model to bf16 has gone wrong.

    The reference computes the rounded weights in fp32. Mean differences measured: 0.007, and 0.04 with frequencies in
    bf16, as Hugging Face's own module has them after `model.to(torch.bfloat16)`.
    """
    rounded = make_tiny("llama", peaky=True)
    for parameter in rounded.parameters():
        parameter.copy_(parameter.bfloat16())
    ids = random_ids(1500)
    engine = make_engine(make_tiny("llama", peaky=True, dtype=torch.bfloat16))
    got = torch.as_tensor(score_all(engine, [ids])[0])
    assert (got - hf_logits(rounded, ids))[1000:].abs().mean() <= 0.015


def test_dynamic_ntk_has_one_base_per_request() -> None:
    """B85: keys under the old base, queries under the new one (huggingface/transformers#25104).

    48 tokens decoded to 100 are as 100 prefilled, both at the base of 100 positions; and the base is in the key.
    """
    model = make_tiny("llama_dynamic", peaky=True)
    engine = make_engine(model)
    tap = LogitTap(engine)
    request = engine.add(random_ids(48), SamplingParams(max_tokens=52, ignore_eos=True))
    run_all(engine)
    tokens = request.token_ids
    assert len(tokens) == 100 and request.regime == 100
    want = hf_logits(model, tokens[:-1], total_tokens=100)
    assert (tap.of(request) - want[47:]).abs().max() <= 1e-4
    prefilled = torch.as_tensor(score_all(make_engine(model), [tokens])[0])
    assert (tap.of(request) - prefilled[47:99]).abs().max() <= 1e-4
    growing = hf_logits(model, tokens[:60])[-1]
    assert (want[59] - growing).abs().max() > 1e-3, "the case can tell the bases apart"
    for total, cached in ((100, 47), (60, 0), (101, 0), (64, 47)):
        event = generate(engine, random_ids(48), total - 48, ignore_eos=True)
        assert event.usage.cached_tokens == cached, total


def test_longrope_has_one_table_per_request() -> None:
    """B85: short keys are not found by a request that will use the long factors (huggingface/transformers#25104)."""
    model = make_tiny("phi3_longrope", peaky=True)
    engine = make_engine(model)
    for total, cached in ((64, 0), (65, 0), (60, 47), (200, 47)):
        tap = LogitTap(engine)
        request = engine.add(random_ids(48), SamplingParams(max_tokens=total - 48, ignore_eos=True))
        run_all(engine)
        assert request.cached_tokens == cached
        want = hf_logits(model, request.token_ids[:-1], total_tokens=total)[47:]
        assert (tap.of(request) - want).abs().max() <= 1e-4


def outputs_by_layer(model: PreTrainedModel) -> list[list[torch.Tensor]]:
    """Lists that fill with each layer's output rows, one tensor per forward."""
    outputs: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    for kept, layer in zip(outputs, model.model.layers, strict=True):
        layer.register_forward_hook(lambda _, __, output, kept=kept: kept.append(output.reshape(-1, 64).clone()))
    return outputs


def test_gemma3_scales_its_global_layers_only() -> None:
    """B87: the factor on sliding layers too, or on none (ggml-org/llama.cpp#14367, ollama/ollama#13474,
    Blaizzy/mlx-vlm#1709, lablup/mlxcel#1340).

    Factor 8 on the global layer, thetas of 1e6 and 1e4: each layer's output is Hugging Face's from 200 to 2,000 tokens.
    """
    model = make_tiny("gemma3_text", peaky=True)
    ids = random_ids(2000)
    engine = make_engine(model, chunk_tokens=512, kv_tokens=2048)
    got, wanted = outputs_by_layer(engine.runner._model), outputs_by_layer(model)
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    generate(engine, ids, 1, ignore_eos=True)
    for layer, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        [want] = theirs
        difference = (torch.cat(ours) - want)[200:].abs().max()
        assert difference <= 1e-4 * want.abs().max(), f"layer {layer}"
