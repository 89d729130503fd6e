"""Engines whose cache is lossy: the same bits whatever the chunk, hit and memory, and no more loss than asked."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from longctx.kv.groups import formats_text
from longctx.kv.sizes import request_bytes
from longctx.params import SamplingParams
from longctx.quant.formats import FORMATS
from tests.helpers.engine import LogitTap, generate, make_engine, run_all, score_all
from tests.helpers.scripted import cold_rows, dictate
from tests.helpers.tiny import make_tiny, random_ids
from tests.helpers.tokenizers import byte_level_tokenizer

KINDS = ["llama", "gemma3_text", "gemma2"]
LOSSY = [name for name, fmt in FORMATS.items() if fmt.lossy]
MIXED = "k:int8,v:int4,layers:1:auto"
IDS = random_ids(230, seed=1)

every_kind = pytest.mark.parametrize("kind", KINDS)
every_format = pytest.mark.parametrize("kv_format", [*LOSSY, MIXED])


@cache
def model_of(kind: str) -> PreTrainedModel:
    return make_tiny(kind, peaky=True)


@cache
def scored(kind: str, kv_format: str) -> np.ndarray:
    """Logits of `IDS` read in one chunk, alone."""
    return score_all(make_engine(model_of(kind), kv_format=kv_format, chunk_tokens=512), [IDS])[0]


def endless(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@every_kind
@every_format
def test_logits_are_bit_equal_whatever_the_chunk(kind: str, kv_format: str) -> None:
    """Rounding noise between chunkings would flip codes, and the difference would grow layer by layer."""
    for options in ({"chunk_tokens": 64}, {"chunk_tokens": 100, "block_tokens": 32}, {"chunk_tokens": 33}):
        engine = make_engine(model_of(kind), kv_format=kv_format, poison="huge", **options)
        mates = [random_ids(61, seed=6)] if options["chunk_tokens"] == 64 else []
        assert np.array_equal(score_all(engine, [IDS, *mates])[0], scored(kind, kv_format)), options


@every_kind
@every_format
def test_a_hit_is_bit_equal_to_a_cold_run(kind: str, kv_format: str) -> None:
    """B54: quantized cache with a hit gave other text than without (NVIDIA/TensorRT-LLM#2699, vllm-project/vllm#3156).

    Hits end inside a block: copy on write takes the scales along.
    """
    options = {"kv_format": kv_format, "deterministic": True}
    cold = cold_rows(model_of(kind), IDS, 4, **options)
    engine = make_engine(model_of(kind), chunk_tokens=64, **options)
    tap = LogitTap(engine)
    for shared in (75, len(IDS)):
        generate(engine, [*IDS[:shared], *random_ids(9, seed=shared)], 1, ignore_eos=True)
        request = engine.add(IDS, endless(4))
        run_all(engine)
        assert request.cached_tokens and request.cached_tokens % 16
        assert torch.equal(tap.of(request), cold)
        if shared == 75:
            engine.cache.clear()


@every_kind
@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_preempted_and_resumed_is_bit_equal(kind: str, kv_format: str) -> None:
    logits, options = [], {"kv_format": kv_format, "deterministic": True, "chunk_tokens": 32}
    for kv_tokens in (2048, 144):
        engine = make_engine(model_of(kind), kv_tokens=kv_tokens, **options)
        tap = LogitTap(engine)
        requests = [engine.add(random_ids(60, seed=seed), endless(24)) for seed in (1, 2)]
        run_all(engine)
        assert (sum(r.preemptions for r in requests) > 0) == (kv_tokens == 144)
        logits.append([tap.of(request) for request in requests])
    assert all(torch.equal(roomy, tight) for roomy, tight in zip(*logits, strict=True))


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_outlier_mates_change_nothing(kv_format: str) -> None:
    """A request's scales are its own: beside a mate whose keys and values are a thousand times larger."""
    model = make_tiny("llama", peaky=True)
    loud = 7
    with torch.no_grad():
        model.model.embed_tokens.weight[loud] *= 1000
        for layer in model.model.layers:
            layer.input_layernorm.weight[:] = 1.0
    rows = []
    for mates in (0, 2):
        engine = make_engine(model, kv_format=kv_format, chunk_tokens=24)
        tap = LogitTap(engine)
        request = engine.add(random_ids(50, seed=3), endless(6))
        for _ in range(mates):
            engine.add([loud] * 40, endless(6))
        run_all(engine)
        rows.append(tap.of(request))
    assert torch.equal(*rows)


# What a format may lose on flat models: the largest difference to fp32's logits over their largest.
@pytest.mark.parametrize(
    ("kv_format", "most"), [("int8", 0.03), ("fp8_e4m3", 0.15), ("fp8_e5m2", 0.25), ("int4", 0.3), (MIXED, 0.3)]
)
@every_kind
def test_the_option_arrives(kind: str, kv_format: str, most: float) -> None:
    """B56: `--kv int8` was dropped on its way, or scales were never filled (InfiniTensor/InfiniLM#553)."""
    model = make_tiny(kind)
    engine = make_engine(model, kv_format=kv_format, chunk_tokens=512)
    block = engine.groups[0].layout.block_tokens
    for group in engine.groups:
        layout, pool = group.layout, engine.runner.storage.pools[group.index]
        assert pool.untyped_storage().nbytes() == engine.partition.num_slots[group.index] * layout.block_bytes
        for layer in group.layers:
            _, kv = engine.runner.storage.layer(layer)
            assert (kv.k.dtype, kv.v.dtype) == (layout.k_format.torch_dtype, layout.v_format.torch_dtype)
            assert sum(x[0].numel() * x.element_size() for x in kv.tensors) <= layout.segment_bytes
    if kv_format != MIXED:
        assert {x.key.k_format for x in engine.groups} == {kv_format} and formats_text(engine.groups) == kv_format
        data, scales = request_bytes([g for g in engine.groups if g.is_full], block)
        assert sum(g.layout.block_bytes for g in engine.groups if g.is_full) == data + scales
    exact = score_all(make_engine(model, chunk_tokens=512), [IDS])[0]
    assert 0 < np.abs(score_all(engine, [IDS])[0] - exact).max() / np.abs(exact).max() < most


def test_blocks_are_shared_only_by_engines_with_the_same_table() -> None:
    """The key names which layer has which format, and two ways to say the same table are one."""
    model = make_tiny("smollm3")
    said = ["layers:1:int8", "layers:2:int8", "layers:1:k:int8", "layers:1:v:int8", "layers:1:int8,layers:1:v:int8"]
    engines = [make_engine(model, kv_format=text) for text in said]
    roots = [engine.make_request(IDS, endless(1)).chain.parent(0) for engine in engines]
    assert len(set(roots)) == 4 and roots[0] == roots[4]


@every_format
@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_what_was_generated_and_dropped_leaves_no_trace(
    kv_format: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B58: rolled back over a border inside a block, forked, continued: as if the dropped tokens never were
    (NVIDIA/kvpress#27, #16; huggingface/transformers#45510, #31661)."""
    tokenizer = byte_level_tokenizer()
    text = tokenizer.encode("the quick brown fox jumps over the lazy dog")
    model, options = model_of("llama"), {"kv_format": kv_format, "deterministic": True, "chunk_tokens": 64}
    engine = make_engine(model, tokenizer=tokenizer, **options)
    stop = ("jumps",) if end == "stop" else ()
    request = engine.add(IDS[:50], SamplingParams(max_tokens=len(text), ignore_eos=True, stop=stop))
    with monkeypatch.context() as patched:
        dictate(patched, lambda row: text[row.start + row.n - 50])
        while engine.has_work:
            engine.step()
            if end == "cancel" and request.num_output_tokens == len(text) - 1:
                engine.cancel(request.id)
    assert 9 < request.num_output_tokens < len(text)
    tap = LogitTap(engine)
    fork = [*IDS[:50], *text[:9], *random_ids(12, seed=8)]
    again = engine.add(fork, endless(4))
    run_all(engine)
    assert again.cached_tokens == 59
    assert torch.equal(tap.of(again), cold_rows(model, fork, 4, **options))
