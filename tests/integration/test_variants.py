"""Streaming and local-chunk attention in the engine, against Hugging Face under the explicit mask in float64."""

# Shape legend: T tokens, V vocabulary.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from longctx.attention.reach import Reach
from longctx.engine import Engine
from longctx.errors import LongctxError
from longctx.evals.needle_model import NeedleModel
from longctx.evals.needle_prompt import NONE
from longctx.kv.partition import PoolShape, partition
from longctx.params import SamplingParams
from longctx.request import Request
from tests.helpers.engine import LogitTap, make_engine, run_all, score_all
from tests.helpers.scripted import cold_rows, greedy_rows
from tests.helpers.tiny import float64, make_tiny, pristine_copy, random_ids

B, TOLERANCE = 16, 1e-4
STREAMING: dict[str, Any] = {"attention_variant": "streaming", "window": 40, "sinks": 5}
CHUNKED: dict[str, Any] = {"attention_variant": "local-chunk", "local_chunk": 50}
VARIANTS = [STREAMING, CHUNKED]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def mask_TT(length: int, reach: Reach) -> torch.Tensor:
    """Additive [1, 1, T, T]: {sinks + recent}, or each one's own chunk; keys at the positions where they stand."""
    query, key = torch.arange(length)[:, None], torch.arange(length)
    seen = key <= query
    if reach.window is not None:
        seen &= (query - key < reach.window) | (key < reach.sinks)
    if reach.local_chunk is not None:
        seen &= query // reach.local_chunk == key // reach.local_chunk
    return torch.zeros(length, length, dtype=torch.float64).masked_fill(~seen, -1e300)[None, None]


def reference(model: PreTrainedModel, ids: Sequence[int], options: dict[str, Any]) -> torch.Tensor:
    """Hugging Face's logits [T, V] in float64, eager, one forward, under the masks of the model and the variant."""
    window = options.get("window")
    full = Reach(window, options.get("sinks", 0)) if window else Reach(local_chunk=options["local_chunk"])
    mask: Any = mask_TT(len(ids), full)
    if getattr(model.config, "sliding_window", None):
        mask = {"full_attention": mask, "sliding_attention": mask_TT(len(ids), Reach(model.config.sliding_window))}
    wide = pristine_copy(model).float()
    with float64(wide), torch.no_grad():
        return wide(torch.tensor([list(ids)]), attention_mask=mask, use_cache=False).logits[0]


def held_slots(request: Request) -> list[int]:
    assert request.table is not None
    return [int(np.count_nonzero(table)) for table in request.table.arrays()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", STREAMING), ("gemma3_text", STREAMING), ("gpt_oss", STREAMING), ("llama", CHUNKED)],
    ids=str,
)
def test_logits_are_the_references_under_the_mask(kind: str, options: dict[str, Any]) -> None:
    """B41: positions of kept keys drift once the window is full (huggingface/transformers#35350, #33692).

    Prefill in chunks that divide neither window nor sinks nor local chunk, and 5 W decoded tokens behind 2 W. A hybrid
    keeps its own windows; gpt-oss keeps its learned sink beside the others.
    """
    model = make_tiny(kind, peaky=True)
    ids = random_ids(4 * 50 + 13)
    engine = make_engine(model, chunk_tokens=37, **options)
    got = torch.as_tensor(score_all(engine, [ids])[0])
    want = reference(model, ids, options)
    assert (got - want).abs().max() <= TOLERANCE
    # Without the variant it would be another answer, so that the comparison says something.
    exact = torch.as_tensor(score_all(make_engine(model, chunk_tokens=37), [ids])[0])
    assert (exact - want).abs().max() > 100 * TOLERANCE
    prompt, steps = ids[: 2 * 40 + 3], 5 * 40
    tap = LogitTap(engine)
    request = engine.add(prompt, params(steps))
    run_all(engine)
    want = reference(model, request.token_ids[:-1], options)[len(prompt) - 1 :]
    assert len(want) == steps and (tap.of(request) - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: o["attention_variant"])
def test_a_replaced_token_changes_exactly_the_rows_that_see_it(options: dict[str, Any]) -> None:
    """B29, B33: one key too many or too few, in chunks: a model of one layer, a token at each edge."""
    model, length = make_tiny("llama", peaky=True, num_hidden_layers=1), 130
    ids = random_ids(length)
    engine = make_engine(model, chunk_tokens=32, **options)
    [base] = score_all(engine, [ids])
    for planted in (0, 4, 5, 49, 50, 70):
        other = [*ids[:planted], 7, *ids[planted + 1 :]]
        if options is STREAMING:
            seen = [i >= planted and (planted < 5 or i - planted < 40) for i in range(length)]
        else:
            seen = [i >= planted and i // 50 == planted // 50 for i in range(length)]
        [rows] = score_all(engine, [other])
        assert (rows != base).any(1).tolist() == seen


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {**STREAMING, "kv_format": "int8"}),
        ("gemma3_text", STREAMING),
        ("llama", CHUNKED),
    ],
    ids=str,
)
def test_no_bit_depends_on_chunks_hits_or_preemption(kind: str, options: dict[str, Any]) -> None:
    """Deterministic mode: chunk 7, 64, whole, a prefix hit, a question that branches off, and a pool for one of two."""
    model = make_tiny(kind, peaky=True)
    ids, options = random_ids(230), {"deterministic": True, **options}
    cold = cold_rows(model, ids, 30, **options)
    for chunk in (7, 64):
        engine = make_engine(model, chunk_tokens=chunk, **options)
        assert torch.equal(greedy_rows(engine, [ids], 30)[0], cold)
        # B39: the same prompt again computes its last position, once.
        request = engine.add(ids, params(1))
        run_all(engine)
        assert request.computed_tokens == 1
        assert torch.equal(greedy_rows(engine, [ids], 2)[0], cold[:2])
    branch = [*ids[:195], *random_ids(30, seed=9)]
    request = engine.add(branch, params(1))
    run_all(engine)
    assert request.cached_tokens >= 192 - B
    assert torch.equal(greedy_rows(engine, [branch], 5)[0], cold_rows(model, branch, 5, **options))


def test_preempted_and_resumed_to_the_same_bits() -> None:
    """B41: what comes back finds its sinks and its window, or computes them again."""
    model = make_tiny("llama", peaky=True)
    prompts, options = [random_ids(100, seed=s) for s in range(2)], {"deterministic": True, **STREAMING}
    cold = [cold_rows(model, ids, 80, **options) for ids in prompts]
    engine = make_engine(model, chunk_tokens=24, **options)
    requests = [engine.add(ids, params(80)) for ids in prompts]
    tap = LogitTap(engine)
    for step in range(10_000):
        if not engine.has_work:
            break
        engine.step()
        engine.check_integrity()
        if step in (9, 70) and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[-1])
    assert sum(r.preemptions for r in requests) == 2
    for request, rows in zip(requests, cold, strict=True):
        assert torch.equal(tap.of(request), rows)


def test_memory_stays_bounded_however_long_it_runs() -> None:
    """B34: what slid out is never given back (vllm-project/vllm#34568): 10 W tokens are decoded, the sinks stay."""
    window, sinks, chunk = 40, 20, 30
    options = {**STREAMING, "sinks": sinks, "chunk_tokens": chunk}
    engine = make_engine(make_tiny("llama"), max_running=1, kv_tokens=64, **options)
    request = engine.add(random_ids(5 * window), params(10 * window))
    sink_blocks = -(-sinks // B)
    first: list[int] = []
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        if request.table is None:
            break
        [table] = request.table.arrays()
        first = first or table[:sink_blocks].tolist()
        assert table[:sink_blocks].tolist() == first and 0 not in first
        within = window if not request.in_prefill and request.num_output_tokens > 1 else window + chunk
        assert held_slots(request)[0] <= -(-within // B) + 2 + sink_blocks
        assert engine.cache_stats()[0].held == held_slots(request)[0]
    assert request.num_tokens == 15 * window


def test_the_smallest_pool_finishes_and_one_block_less_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """B35: admission counts the capped need, allocation the full one (vllm-project/vllm#7470, xLLM-AI/xllm#1689)."""
    model, chunk = make_tiny("llama", peaky=True), 40
    slots = -(-(40 + chunk) // B) + 2 + 1
    ids = random_ids(20 * 40)
    with monkeypatch.context() as patch:
        patch.setattr(PoolShape, "_window_blocks", lambda *_: slots - 1)
        engine = make_engine(model, chunk_tokens=chunk, max_running=1, **STREAMING)
    assert engine.cache_stats()[0].total == slots - 1
    assert torch.equal(greedy_rows(engine, [ids], 3)[0], cold_rows(model, ids, 3, **STREAMING))
    shape = engine.partition.shape
    sizes = (1, chunk, shape.max_model_len)
    assert partition(shape.groups, shape.min_kv_bytes, *sizes).num_slots[0] >= slots
    with pytest.raises(LongctxError, match="set --kv-memory to at least"):
        partition(shape.groups, shape.min_kv_bytes - 1, *sizes)


def test_a_far_fact_is_kept_by_full_attention_and_lost_by_the_variant() -> None:
    """What the user chooses to lose, and nothing else: needles among the sinks and in the window are still found."""
    needle = NeedleModel(num_keys=8)
    depths = {0: 0.0, 1: 0.3, 2: 0.6, 3: 0.97}
    ids = needle.make_prompt(1500, depths, seed=1)
    places = {
        key: next(i for i, t in enumerate(ids) if t in range(needle.vocab.pair(key, 0), needle.vocab.pair(key + 1, 0)))
        for key in depths
    }

    def answers(engine: Engine) -> dict[int, int]:
        requests = {key: engine.add([*ids, *needle.query_ids(key)], params(1)) for key in depths}
        run_all(engine)
        return {key: request.token_ids[-1] for key, request in requests.items()}

    right = {key: needle.answer([*ids, *needle.query_ids(key)]) for key in depths}
    options: dict[str, Any] = {"chunk_tokens": 300, "block_tokens": 64}
    assert answers(make_engine(needle.build(), **options)) == right
    window, sinks = 200, places[0] + 1
    streaming = make_engine(needle.build(), attention_variant="streaming", window=window, sinks=sinks, **options)
    kept = {key for key, place in places.items() if place < sinks or place > len(ids) - window}
    assert kept == {0, 3}
    assert answers(streaming) == {key: right[key] if key in kept else NONE for key in depths}
    chunked = make_engine(needle.build(), attention_variant="local-chunk", local_chunk=400, **options)
    assert answers(chunked) == {key: right[key] if places[key] >= 1200 else NONE for key in depths}


def test_variants_never_share_blocks_and_a_plan_counts_what_they_hold() -> None:
    model = make_tiny("llama")
    roots = set()
    for options in ({}, STREAMING, {**STREAMING, "sinks": 4}, {**STREAMING, "window": 41}, CHUNKED):
        engine = make_engine(model, **options)
        request = engine.make_request(random_ids(40), params(1))
        roots.add(request.chain.parent(0))
        vector = 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, dims, fp32
        held = {None: 300, "streaming": options.get("window", 0) + options.get("sinks", 0), "local-chunk": 50}
        plan = engine.plan(300)
        assert plan.kv_bytes == vector * held[options.get("attention_variant")]
        assert plan.attention_variant == engine.config.variant.key
        assert plan.bytes_per_token == (0 if options else vector)
    assert len(roots) == 5
