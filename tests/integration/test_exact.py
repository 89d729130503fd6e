"""The engine's logits are Hugging Face's, whatever the chunk, the block, the length, the hit and the batch mates."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from longctx.params import SamplingParams
from tests.helpers.engine import LogitTap, make_engine, poison_pools, run_all, score_all
from tests.helpers.pairwise import pairwise
from tests.helpers.tiny import TINY, hf_logits, hf_logits64, make_tiny, random_ids

MOE = ("mixtral", "qwen3_moe", "gpt_oss", "llama4_text")
NEW_TOKENS = 4
CASES = pairwise(
    {
        "kind": list(TINY),
        "peaky": [False, True],
        "chunk": [3, 16, 17, 64, 512],
        "block": [16, 32],
        "length": [1, 15, 16, 33, 96, 150],
        "warm": ["cold", "same", "prefix"],
        "mates": [0, 2],
        "poison": ["nan", "huge", "-huge"],
    }
)


@cache
def model_of(kind: str, peaky: bool):
    return make_tiny(kind, peaky=peaky)


@cache
def reference(kind: str, peaky: bool, ids: tuple[int, ...], total: int) -> tuple[torch.Tensor, float]:
    """Hugging Face's logits and the tolerance its own rounding allows."""
    model = model_of(kind, peaky)
    logits = hf_logits(model, ids, total)
    error = (logits.double() - hf_logits64(model, ids, total)).abs().max().item()
    return logits, max(1e-4, 3 * error)


def check(kind: str, peaky: bool, ids: list[int], total: int, got: torch.Tensor, first: int) -> None:
    want, tolerance = reference(kind, peaky, tuple(ids), total)
    difference = (got - want[first : first + len(got)]).abs().max().item()
    assert difference <= tolerance, f"logits differ by {difference:.2e}, allowed {tolerance:.2e}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_every_case_gives_hugging_face_logits(case: dict[str, Any]) -> None:
    """Pairwise over type, weights, chunk, block, length, hit, mates and poison; prefill and decode (B01, B03, B44)."""
    kind, peaky = case["kind"], case["peaky"]
    engine = make_engine(
        model_of(kind, peaky), chunk_tokens=case["chunk"], block_tokens=case["block"], poison=case["poison"]
    )
    tap = LogitTap(engine)
    ids = random_ids(case["length"], seed=case["length"])
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    if case["warm"] == "same":
        engine.add(ids, params)
    elif case["warm"] == "prefix":
        engine.add([*ids[: len(ids) * 2 // 3], *random_ids(20, seed=99)], params)
    run_all(engine)
    mates = [engine.add(random_ids(40 + 30 * i, seed=7 + i), params) for i in range(case["mates"])]
    request = engine.add(ids, params)
    run_all(engine)
    for r in (request, *mates):
        total = r.num_prompt_tokens + NEW_TOKENS
        check(kind, peaky, r.token_ids[:-1], total, tap.of(r), r.num_prompt_tokens - 1)
    if case["warm"] == "same" and len(ids) > 1 and not mates:
        assert request.cached_tokens == len(ids) - 1


@pytest.mark.slow
@pytest.mark.parametrize("peaky", [False, True], ids=["flat", "peaky"])
@pytest.mark.parametrize("kind", list(TINY))
def test_every_position_is_exact_and_bit_equal_between_chunkings(kind: str, peaky: bool) -> None:
    """All positions' logits against Hugging Face, and bit for bit between chunk sizes, block sizes and mates."""
    ids, mate = random_ids(150, seed=5), random_ids(61, seed=6)
    base = None
    for chunk, block, mates in ((512, 16, []), (1, 16, []), (7, 16, [mate]), (16, 32, []), (37, 16, [mate, mate])):
        engine = make_engine(model_of(kind, peaky), chunk_tokens=chunk, block_tokens=block)
        got = torch.as_tensor(score_all(engine, [ids, *mates])[0])
        check(kind, peaky, ids, len(ids), got, 0)
        base = got if base is None else base
        if kind in MOE:
            # Experts are plain matrix products whose rounding depends on how many tokens visit them.
            assert (got - base).abs().max() <= 1e-5 * max(1.0, base.abs().max().item())
        else:
            assert torch.equal(got, base), f"chunk {chunk}: {(got - base).abs().max():.2e}"


@pytest.mark.parametrize("kind", [kind for kind in TINY if kind not in MOE])
def test_decoded_logits_do_not_depend_on_batch_mates(kind: str) -> None:
    """A decoding row's logits are bit-equal alone and beside other decodes and prefills."""
    ids, params = random_ids(50, seed=3), SamplingParams(max_tokens=6, ignore_eos=True)
    rows = []
    for mates in (0, 3):
        engine = make_engine(model_of(kind, True), chunk_tokens=24)
        tap = LogitTap(engine)
        request = engine.add(ids, params)
        for i in range(mates):
            engine.add(random_ids(30 * i + 5, seed=20 + i), params)
        run_all(engine)
        rows.append(tap.of(request))
    assert torch.equal(rows[0], rows[1])


def test_deterministic_mode_is_bit_equal_through_preemption() -> None:
    """Decoded tokens recomputed after a preemption give the same bits when both take the prefill kernel."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    logits = []
    for kv_tokens in (2048, 160):
        engine = make_engine(model_of("llama", True), deterministic=True, chunk_tokens=32, kv_tokens=kv_tokens)
        tap = LogitTap(engine)
        first = engine.add(random_ids(60, seed=1), params)
        second = engine.add(random_ids(60, seed=2), params)
        run_all(engine)
        logits.append((tap.of(first), tap.of(second), first.preemptions + second.preemptions))
    assert logits[0][2] == 0 and logits[1][2] > 0
    assert torch.equal(logits[0][0], logits[1][0]) and torch.equal(logits[0][1], logits[1][1])


@pytest.mark.parametrize("kind", ["phi3_longrope", "llama_dynamic"])
def test_a_longer_mate_does_not_change_a_short_requests_rope(kind: str) -> None:
    """Rope regimes are per request: a short request beside one past the original positions is as if alone."""
    short, long = random_ids(30, seed=1), random_ids(140, seed=2)
    engine = make_engine(model_of(kind, True), chunk_tokens=64)
    got_short, got_long = (torch.as_tensor(x) for x in score_all(engine, [short, long]))
    check(kind, True, short, len(short), got_short, 0)
    check(kind, True, long, len(long), got_long, 0)
    assert not np.allclose(got_long[:30], hf_logits(model_of(kind, True), long[:30]), atol=1e-3)


def test_poison_after_release_changes_nothing() -> None:
    """Slots that no one refers to may hold anything: poison them between two requests, cold each time."""
    engine = make_engine(model_of("gemma3_text", True), chunk_tokens=64)
    ids = random_ids(200, seed=4)
    first = score_all(engine, [ids])[0]
    engine.cache.clear()
    poison_pools(engine, 1e4)
    assert np.array_equal(first, score_all(engine, [ids])[0])
