"""Fault cases of cache identity: who may share blocks with whom, asked of whole engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longctx.params import SamplingParams
from tests.helpers.engine import LogitTap, digest_of, generate, make_engine, run_all
from tests.helpers.scripted import cold_rows, greedy_rows
from tests.helpers.tiny import make_tiny, random_ids

LONG = random_ids(70, seed=1)


def shared_tokens(kind: str, ours: dict[str, Any], theirs: dict[str, Any], **options: Any) -> int:
    """How much of a prompt one engine finds that another one computed, were its cache the same."""
    engines = [make_engine(make_tiny(kind, **overrides), **options) for overrides in (ours, theirs)]
    generate(engines[0], LONG, 1, ignore_eos=True)
    request = engines[1].make_request(LONG, SamplingParams(max_tokens=1))
    return engines[0].cache.match(request.chain, len(LONG) - 1).tokens


def test_400_prompts_twice_are_as_without_a_cache() -> None:
    """B08: blocks found by a hash that collides (vllm-project/vllm#12621, #15297, #54727).

    Keys are digests of 256 bits; all prompts begin alike, and every logit is that of an engine without a cache.
    """
    model = make_tiny("llama", peaky=True, num_hidden_layers=1)
    start = random_ids(16, seed=1)
    prompts = [[*start, *random_ids(4, seed=10 + i)] for i in range(400)]
    options = {"max_running": 100, "kv_tokens": 420 * 16, "block_tokens": 4}
    cached = make_engine(model, **options)
    first, second = (greedy_rows(cached, prompts, 1) for _ in range(2))
    plain = greedy_rows(make_engine(model, prefix_cache=False, **options), prompts, 1)
    for row in range(400):
        assert torch.equal(first[row], plain[row]) and torch.equal(second[row], plain[row])
    index = cached.cache._groups[0].index
    keys = [index.entry(slot).key for slot in index.slots()]
    assert len(keys) > 400 and {len(key) for key in keys if key is not None} == {32}


def test_a_salt_is_a_namespace_of_hits_and_of_time() -> None:
    """B10: tenants learn each other's prompts from hits (vllm-project/vllm#16016, #17045, #53347).

    The same salt hits and another does not; no salt and an empty one are two namespaces, and salts are not joined to
    anything (tinfoilsh/confidential-model-router#386).
    """
    engine = make_engine(make_tiny("llama"))
    salts = [None, "", "org_1", "org_12345", "2345", "x"]

    def cached_tokens(salt: str | None) -> int | None:
        request = engine.add(LONG, SamplingParams(max_tokens=1), cache_salt=salt)
        run_all(engine)
        return request.cached_tokens

    assert [cached_tokens(salt) for salt in salts] == [0] * len(salts)
    assert [cached_tokens(salt) for salt in salts] == [len(LONG) - 1] * len(salts)


def test_weights_changed_in_place_find_nothing_old() -> None:
    """B12: the old adapter's keys and values under the same name (vllm-project/vllm#3264, #30931, #42125).

    Weights are changed while a request runs; the cache is cleared. What was cached before, what that request held and
    what it adds later are all of the old weights.
    """
    model = make_tiny("llama", peaky=True)
    engine = make_engine(model, chunk_tokens=32)
    before = greedy_rows(engine, [LONG], 2)[0]
    running = engine.add(random_ids(90, seed=2), SamplingParams(max_tokens=1))
    engine.step()
    with torch.no_grad():
        for changed in (model, engine.runner._model):
            changed.model.norm.weight.mul_(1.5)
            changed.model.embed_tokens.weight.mul_(-1.0)
    engine.cache.clear()
    run_all(engine)
    assert running.num_output_tokens == 1
    # Twice: the first run brings back the blocks at the front, and the second would find what stands behind them.
    for ids in (LONG, random_ids(90, seed=2), random_ids(90, seed=2)):
        after = greedy_rows(engine, [ids], 2)[0]
        assert torch.equal(after, cold_rows(model, ids, 2))
    assert not torch.allclose(before, greedy_rows(engine, [LONG], 2)[0], atol=1e-2)


def test_other_weights_share_nothing() -> None:
    """B14: a restart with other weights under the same name finds the old keys (sgl-project/sglang#24758, #24794)."""
    assert shared_tokens("llama", {}, {}) == len(LONG) - 1
    assert shared_tokens("llama", {"seed": 0}, {"seed": 1}) == 0


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("llama_yarn", {"rope_parameters": {**YARN, "factor": 4.0}}),
        ("llama_yarn", {"rope_parameters": {**YARN, "beta_fast": 16.0}}),
        ("gemma2", {"attn_logit_softcapping": 21.0}),
        ("gemma2", {"sliding_window": 33}),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("gemma2", {"query_pre_attn_scalar": 25}),
        ("granite", {"attention_multiplier": 0.12}),
        ("granite", {"embedding_multiplier": 3.5}),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
        ("llama", {"rms_norm_eps": 1e-3}),
    ],
)
def test_a_changed_configuration_shares_nothing(
    kind: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B14: one setting is changed under the same weight files (sgl-project/sglang#24794): another root, no hit."""
    monkeypatch.setattr("tests.helpers.engine.digest_of", lambda _: "the same weights")
    assert shared_tokens(kind, {}, {}) == len(LONG) - 1
    assert shared_tokens(kind, {}, changed) == 0


def test_another_dtype_format_or_block_size_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """B16, B14: block size is a part of the key (ai-dynamo/dynamo#1233, vllm-project/vllm#57304), so are the formats.

    16, 32, 16: no hit across sizes, and the third engine would find all that the first one stored.
    """
    monkeypatch.setattr("tests.helpers.engine.digest_of", lambda _: "the same weights")
    model = make_tiny("llama")
    settings = [{}, {"block_tokens": 32}, {}, {"kv_format": "bf16"}, {"kv_format": "fp16"}]
    engines = [make_engine(model, **options) for options in settings]
    engines.append(make_engine(make_tiny("llama", dtype=torch.bfloat16), kv_format="fp32"))
    chains = [engine.make_request(LONG, SamplingParams(max_tokens=1)).chain for engine in engines]
    generate(engines[0], LONG, 1, ignore_eos=True)
    hits = [engines[0].cache.match(chain, len(LONG) - 1).tokens for chain in chains]
    assert hits == [len(LONG) - 1, 0, len(LONG) - 1, 0, 0, 0]
    assert len({chain.parent(0) for chain in chains}) == 5


def test_a_hit_of_two_of_four_blocks_is_counted_and_computed_as_two() -> None:
    """B16: a unit of four blocks matches in two only (vllm-project/vllm#57304): counted as two and loaded as two."""
    model = make_tiny("llama", peaky=True)
    engine = make_engine(model)
    generate(engine, LONG[:64], 1, ignore_eos=True)
    tap = LogitTap(engine)
    ids = [*LONG[:32], *random_ids(40, seed=9)]
    request = engine.add(ids, SamplingParams(max_tokens=2, ignore_eos=True))
    run_all(engine)
    assert request.cached_tokens == 32 and request.computed_tokens == len(ids) - 32 + 1
    assert torch.equal(tap.of(request), cold_rows(model, ids, 2))


def test_the_digest_of_the_helper_can_tell_weights_apart() -> None:
    assert digest_of(make_tiny("llama", seed=0)) != digest_of(make_tiny("llama", seed=1))
