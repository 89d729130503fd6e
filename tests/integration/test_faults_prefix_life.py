"""Fault cases of a block's life: published, shared, evicted, reused and accounted for, with logits as the judge."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from longctx.engine import Engine
from longctx.errors import DoesNotFitError
from longctx.events import FinishEvent
from longctx.params import SamplingParams
from longctx.request import Request, Status
from longctx.sampler import SamplingError
from tests.helpers.engine import LogitTap, generate, make_engine, run_all
from tests.helpers.scripted import cold_rows, dictate, greedy_rows
from tests.helpers.tiny import make_tiny, random_ids
from tests.helpers.tokenizers import byte_level_tokenizer

B = 16


def make_model(kind: str, **options) -> PreTrainedModel:
    """A Llama, or a Gemma 3 of one sliding and one global layer: two layers suffice here, and are soon done."""
    if kind == "gemma3_text":
        options |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    return make_tiny(kind, **options)


def params(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def free_of(engine: Engine) -> list[int]:
    return [stats.free + stats.cached for stats in engine.cache_stats()]


def test_a_recycled_block_is_not_served_for_its_old_prompt() -> None:
    """B19: an entry outlives its slot (vllm-project/vllm#4761, ovg-project/kvcached#362).

    A pool of 8 blocks: A, then B and C take its blocks, then A again. Every step checks that index and pool agree.
    """
    model = make_tiny("llama", peaky=True)
    engine = make_engine(model, kv_tokens=8 * B)
    prompts = [random_ids(80, seed=i) for i in range(3)]
    for ids, again in ((0, False), (1, False), (2, False), (0, True)):
        tap = LogitTap(engine)
        request = engine.add(prompts[ids], params(3))
        run_all(engine)
        assert torch.equal(tap.of(request), cold_rows(model, prompts[ids], 3))
        assert request.cached_tokens == 0, again


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("together", [True, False])
def test_six_prompts_with_one_beginning_are_as_if_alone(kind: str, together: bool) -> None:
    """B21: hits on blocks that do not exist yet (vllm-project/vllm#37152, #7414, GeeeekExplorer/nano-vllm#209).

    All in one step, or one every step while the first is in mid-chunk; unwritten memory is NaN.
    """
    model = make_model(kind, peaky=True)
    document = random_ids(5 * B, seed=1)
    prompts = [[*document, *random_ids(1 + 3 * i, seed=50 + i)] for i in range(6)]
    engine = make_engine(model, chunk_tokens=24)
    tap = LogitTap(engine)
    requests = []
    for prompt in prompts:
        requests.append(engine.add(prompt, params(3)))
        if not together:
            engine.step()
            engine.check_integrity()
    run_all(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        assert torch.equal(tap.of(request), cold_rows(model, prompt, 3))
    assert sum(r.computed_tokens for r in requests) <= sum(len(p) + 2 for p in prompts)
    assert sum(r.cached_tokens or 0 for r in requests) == 5 * len(document)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_whole_hit_beside_a_reader_of_the_same_block(kind: str) -> None:
    """B22: the recomputed last token overwrites a shared block (vllm-project/vllm#11186, #17999).

    Four whole blocks three times, the first still decoding; then one token more, and one less.
    """
    model = make_model(kind, peaky=True)
    ids = random_ids(65, seed=8)
    engine = make_engine(model)
    tap = LogitTap(engine)
    reader = engine.add(ids[:64], params(12))
    engine.step()
    others = []
    for prompt in (ids[:64], ids[:64], ids, ids[:63]):
        others.append(engine.add(prompt, params(2)))
        engine.step()
        engine.check_integrity()
    run_all(engine)
    assert [r.cached_tokens for r in others] == [63, 63, 64, 62]
    assert torch.equal(tap.of(reader), cold_rows(model, ids[:64], 12))
    for request in others:
        assert torch.equal(tap.of(request), cold_rows(model, request.token_ids[: request.num_prompt_tokens], 2))


def test_hits_in_the_free_list_are_not_counted_as_free_as_well() -> None:
    """B23: admission believes in enough blocks and runs out (vllm-project/vllm#11565, ROCm/ATOM#902).

    Four idle cached blocks of six, a request that shares three and needs four new: refused for good, since it needs
    seven. In a pool of eight beside a request that holds two it waits, and nothing moves while it does.
    """
    model = make_tiny("llama", peaky=True)
    cached = random_ids(4 * B, seed=1)
    wanting = [*cached[: 3 * B], *random_ids(4 * B, seed=2)]
    engine = make_engine(model, kv_tokens=6 * B)
    generate(engine, cached, 1, ignore_eos=True)
    before = engine.cache_stats()
    assert before[0].cached == 4
    with pytest.raises(DoesNotFitError):
        engine.add(wanting, params(1))
    assert engine.cache_stats() == before

    engine = make_engine(model, kv_tokens=8 * B)
    generate(engine, cached, 1, ignore_eos=True)
    holder = engine.add(random_ids(B + 4, seed=3), params(8))
    engine.step()
    held = engine.cache_stats()
    tap = LogitTap(engine)
    request = engine.add(wanting, params(1))
    while holder.status is not Status.FINISHED:
        engine.step()
        engine.check_integrity()
        if holder.status is Status.RUNNING:
            assert request.status is Status.WAITING and engine.cache_stats() == held
    run_all(engine)
    assert request.cached_tokens == 3 * B and request.preemptions == holder.preemptions == 0
    assert torch.equal(tap.of(request), cold_rows(model, wanting, 1))


ENDINGS: dict[str, Callable[[Engine, int], Request]] = {
    "eos at once": lambda engine, i: engine.add(random_ids(20 + i % 13, seed=i), SamplingParams(max_tokens=9)),
    "block edge": lambda engine, i: engine.add(random_ids(20, seed=i), params(12 + i % 3)),
    "stop string": lambda engine, i: engine.add(random_ids(18 + i % 7, seed=i), params(20, stop=("zz",))),
    "abort": lambda engine, i: engine.add(random_ids(40, seed=i), params(30)),
    "error": lambda engine, i: engine.add(random_ids(25 + i % 9, seed=i % 20), params(5)),
}


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_200_requests_of_every_ending_give_all_slots_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B25: two paths, or none, free the last token's slot (sgl-project/sglang#6888, #140, sgl-project/sglang-jax#982).

    EOS on the first token, the last token on a block's edge, a stop string, an abort after 0 to 6 steps, an error.
    """
    tokenizer = byte_level_tokenizer()
    z = tokenizer.convert_tokens_to_ids("z")
    endings: dict[str, str] = {}

    def script(row) -> int | SamplingError:
        ending, generated = endings[row.request_id], row.start + row.n - row.num_prompt_tokens
        if ending == "error" and generated == 2:
            return SamplingError("no token can be sampled")
        return 2 if ending == "eos at once" else z if ending == "stop string" and generated >= 2 else 5

    dictate(monkeypatch, script)
    engine = make_engine(make_model(kind), tokenizer=tokenizer, eos=[2], chunk_tokens=16, kv_tokens=640)
    before = free_of(engine)
    reasons: dict[str, set[str]] = {name: set() for name in ENDINGS}
    for round_ in range(20 if kind == "gemma3_text" else 40):
        for name, add in ENDINGS.items():
            request = add(engine, round_)
            endings[request.id] = name
        doomed = next(r for r in engine.scheduler.requests() if endings[r.id] == "abort")
        for step in range(60):
            if step == round_ % 7:
                engine.cancel(doomed.id)
            for event in engine.step():
                if isinstance(event, FinishEvent):
                    reasons[endings[event.request_id]].add(event.reason)
            engine.check_integrity()
            if not engine.has_work:
                break
        assert free_of(engine) == before and not engine.has_work
        assert all(stats.held == 0 for stats in engine.cache_stats())
    assert reasons == {
        "eos at once": {"stop"},
        "block edge": {"length"},
        "stop string": {"stop"},
        "abort": {"cancelled"},
        "error": {"error"},
    }
    engine.cache.clear()
    assert all(stats.free == stats.total for stats in engine.cache_stats())


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_partial_block_that_was_filled_is_never_its_old_self(kind: str) -> None:
    """B27: a superseded partial entry comes back to life (vllm-project/vllm#49125).

    One and a half blocks are cached, decoding makes them two; prompts that branch off before, at and after the half.
    """
    model = make_model(kind, peaky=True)
    engine = make_engine(model)
    ids = random_ids(24, seed=3)
    generate(engine, ids, 1, ignore_eos=True)
    longer = generate(engine, ids, 10, ignore_eos=True)
    tokens = [*ids, *longer.token_ids]
    for length in (20, 24, 25, 31, 33):
        prompt = [*tokens[:length], *random_ids(3, seed=length)]
        tap = LogitTap(engine)
        request = engine.add(prompt, params(2))
        run_all(engine)
        assert (request.cached_tokens or 0) >= min(length, 32)
        # A hit may lie on rows that were decoded by another kernel, whose last bits differ.
        assert (tap.of(request) - cold_rows(model, prompt, 2)).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_preempted_request_resumes_with_what_it_generated(kind: str) -> None:
    """B28: the look-up on resume forgets generated tokens, or takes overwritten rows (LMCache/LMCache#1969, #2007).

    Seven blocks, prompts of 34 and 35 tokens, 24 more each: one is preempted in mid-decode. The logits are those of a
    pool without limit, and the hit covers all its whole blocks.
    """
    model = make_model(kind, peaky=True)
    prompts = [random_ids(n, seed=n) for n in (34, 35)]
    engine = make_engine(model, kv_tokens=7 * B)
    tap = LogitTap(engine)
    requests = [engine.add(ids, params(24)) for ids in prompts]
    matched = []
    start = engine.scheduler._start
    engine.scheduler._start = lambda r, m: matched.append((r, r.num_tokens, m.tokens)) or start(r, m)
    run_all(engine)
    assert requests[1].preemptions == 1 and requests[0].preemptions == 0
    resumed = [(tokens, hit) for r, tokens, hit in matched[2:] if r is requests[1]]
    assert len(resumed) == 1
    tokens, hit = resumed[0]
    assert hit >= (tokens - 1) // B * B > 35
    for request, ids in zip(requests, prompts, strict=True):
        assert (tap.of(request) - greedy_rows(make_engine(model), [ids], 24)[0]).abs().max() <= 1e-4


def test_the_null_block_is_never_written() -> None:
    """B25, B34: slot 0 stands for blocks that slid out; every pool's null block keeps its poison to the end."""
    engine = make_engine(make_model("gemma3_text"), chunk_tokens=24)
    for i in range(3):
        generate(engine, random_ids(150, seed=i % 2), 5, ignore_eos=True)
    for layer in range(2):
        _, kv = engine.runner.storage.layer(layer)
        assert kv.k[0].isnan().all() and kv.v[0].isnan().all()
