"""Engines on int8 weights: the same bits whatever the chunk, the hit, the mates and the memory; its own blocks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from longctx.config import EngineConfig
from longctx.errors import LongctxError, ModelError
from longctx.evals.bench.floors import decode_floor
from longctx.kv.memory import fixed_for
from longctx.llm import LLM
from longctx.models.inspect import spec_from_config
from longctx.models.int8_linears import Int8Linear
from longctx.models.load import load_model
from longctx.params import SamplingParams
from longctx.rates import rates_path
from tests.helpers.engine import LogitTap, generate, make_engine, run_all, score_all
from tests.helpers.tiny import TINY, make_tiny, random_ids

KINDS = ["llama", "gemma3_text", "qwen2"]
IDS = random_ids(150, seed=1)
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def model_of(kind: str) -> PreTrainedModel:
    return make_tiny(kind, peaky=True)


def endless(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@every_kind
def test_logits_are_bit_equal_whatever_the_chunk_and_the_hit(kind: str) -> None:
    """Decoded tokens too: one row takes the same integers as many. Mutant: a scale for the whole batch."""
    options = {"weights": "int8", "deterministic": True}
    whole = score_all(make_engine(model_of(kind), chunk_tokens=512, **options), [IDS])[0]
    for chunk in (7, 64, 100):
        engine = make_engine(model_of(kind), chunk_tokens=chunk, poison="huge", **options)
        assert np.array_equal(score_all(engine, [IDS, *[random_ids(61, seed=6)] * (chunk == 64)])[0], whole), chunk
    tap = LogitTap(engine)
    generate(engine, [*IDS[:75], *random_ids(9, seed=2)], 1, ignore_eos=True)
    request = engine.add(IDS[:-4], endless(4))
    run_all(engine)
    assert 64 <= request.cached_tokens < len(IDS) - 4
    assert np.array_equal(tap.of(request)[0], whole[len(IDS) - 5])


def test_preempted_and_resumed_is_bit_equal() -> None:
    logits = []
    for kv_tokens in (2048, 160):
        engine = make_engine(
            model_of("llama"), weights="int8", deterministic=True, chunk_tokens=32, kv_tokens=kv_tokens
        )
        tap = LogitTap(engine)
        requests = [engine.add(random_ids(60, seed=seed), endless(40)) for seed in (1, 2)]
        run_all(engine)
        assert (sum(r.preemptions for r in requests) > 0) == (kv_tokens == 160)
        logits.append([tap.of(request) for request in requests])
    assert all(torch.equal(roomy, tight) for roomy, tight in zip(*logits, strict=True))


def test_an_outlier_mate_changes_nothing() -> None:
    """With one scale for all rows a mate whose activations are a thousand times larger took the others' codes away."""
    model, loud = make_tiny("llama", peaky=True), 7
    with torch.no_grad():
        model.model.embed_tokens.weight[loud] *= 1000
        for layer in model.model.layers:
            layer.mlp.up_proj.weight *= 3
    rows = []
    for mates in (0, 2):
        engine = make_engine(model, weights="int8", chunk_tokens=24)
        tap = LogitTap(engine)
        request = engine.add([i for i in random_ids(50, seed=3) if i != loud], endless(6))
        for _ in range(mates):
            engine.add([loud] * 40, endless(6))
        run_all(engine)
        rows.append(tap.of(request))
    assert torch.equal(*rows)


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe"])
def test_the_option_arrives_and_loses_little(kind: str) -> None:
    model = make_tiny(kind)
    engine, plain = make_engine(model, weights="int8"), make_engine(model)
    modules = list(engine.runner._model.modules())
    assert any(isinstance(module, Int8Linear) for module in modules)
    assert not any(type(module).__name__ in ("Linear", "PackedLinear") for module in modules)
    got, exact = score_all(engine, [IDS])[0], score_all(plain, [IDS])[0]
    difference = np.abs(got - exact).mean() / np.abs(exact).mean()
    assert 0 < difference < 0.1


def test_blocks_and_rates_are_its_own() -> None:
    """Mutant: the weight mode left out of the key."""
    engines = [make_engine(model_of("llama"), weights=weights) for weights in ("auto", "int8")]
    keys = [engine.make_request(IDS, endless(1)).chain.key(0) for engine in engines]
    assert keys[0] != keys[1]
    assert rates_path(engines[0].loaded.spec) != rates_path(engines[1].loaded.spec)


@pytest.mark.parametrize("kind", TINY)
def test_the_plan_counts_what_is_there(kind: str) -> None:
    """Weights as resident, a tied embedding not counted: only the rows in use are. Scales included."""
    config = make_tiny(kind).config
    spec, plain = (spec_from_config(config, "tiny", weights=weights) for weights in ("int8", "auto"))
    engine = make_engine(make_tiny(kind), weights="int8")
    model, held = engine.runner._model, 0
    for module in model.modules():
        if isinstance(module, Int8Linear):
            held += module.weight_codes.packed.nbytes + module.weight_codes.scale_O.nbytes
            held += 0 if module.bias is None else module.bias.nbytes
    dense = {id(p): p.nbytes for name, p in model.named_parameters() if not (spec.tied and "embed_tokens" in name)}
    # Joined weights share their padding to whole panels.
    assert 0 <= spec.weight_bytes - held - sum(dense.values()) <= 0.1 * spec.weight_bytes
    assert fixed_for(spec, 512, 1).weight_bytes == spec.weight_bytes < plain.weight_bytes
    step = decode_floor(spec, 1).bytes_read - decode_floor(spec, 1, weight_bytes=0).bytes_read
    assert step == spec.int8_bytes + 4 * (spec.active_linear_params + spec.head_params - spec.int8_params)


def test_refusals_are_one_line() -> None:
    with pytest.raises(LongctxError, match="weights 'int3' are not known; choose auto or int8"):
        EngineConfig.from_options("tiny", weights="int3")
    config = make_tiny("llama").config
    for options in ({"device": "cuda"}, {"dtype": "bfloat16"}):
        with pytest.raises(ModelError, match="--weights int8 is for float32 on a CPU, not"):
            spec_from_config(config, "tiny", weights="int8", **options)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_model_folder_end_to_end(kind: str, tmp_path: Path) -> None:
    """A folder in bf16: linears stay as stored and mapped until they are quantized, look-ups and norms become fp32."""
    folder = tmp_path / "model"
    make_tiny(kind).bfloat16().save_pretrained(folder)
    model = load_model(str(folder), weights="int8").model
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert model.model.embed_tokens.weight.dtype == model.model.norm.weight.dtype == torch.float32
    assert model.lm_head.weight.dtype == (torch.float32 if kind == "qwen2" else torch.bfloat16)
    expected = score_all(make_engine(make_tiny(kind).bfloat16().float(), weights="int8"), [IDS[:40]])[0]
    with LLM(str(folder), weights="int8", kv_memory="4MiB", max_model_len=256, max_running=1) as llm:
        assert llm.engine.loaded.spec.weights == "int8" and llm.plan(IDS[:40]).weight_bytes < 200_000
        logits = llm.score(IDS[:40], logits=True).logits
        assert logits is not None and np.array_equal(logits, expected)
