"""Fault cases of sliding windows: what is kept, what a row sees, and models that mix windows with global layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longctx.errors import LongctxError
from longctx.kv.partition import PoolShape, partition
from longctx.params import SamplingParams
from longctx.quant.store import gather_tokens
from longctx.request import Status
from tests.helpers.engine import LogitTap, generate, make_engine, run_all, score_all
from tests.helpers.scripted import cold_rows
from tests.helpers.tiny import hf_logits, make_tiny, random_ids

B = 16
WINDOW = {"gemma3_text": 32, "mistral": 24}


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("kind", WINDOW)
def test_decoding_across_every_border_of_the_window(kind: str) -> None:
    """B31: a sliding layer goes wrong where the length reaches the window (huggingface/transformers#37574, #38046).

    Lengths W-1, W, W+1, 2W-1, 2W and 2W+1 are all passed in decode. At each step the last W keys and values of every
    sliding layer are, in order, those that were computed, and the logits are Hugging Face's.
    """
    window = WINDOW[kind]
    model = make_tiny(kind, peaky=True)
    engine = make_engine(model)
    tap = LogitTap(engine)
    layers = engine.loaded.spec.layers
    computed: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in layers]
    forward = engine.runner._forward

    def noted(rows, plan, kept):
        attend = plan.attend_layer

        def attend_layer(layer, q_HTD, k_KTD, v_KTD, **options):
            computed[layer].append((k_KTD.clone(), v_KTD.clone()))
            return attend(layer, q_HTD, k_KTD, v_KTD, **options)

        plan.attend_layer = attend_layer
        return forward(rows, plan, kept)

    engine.runner._forward = noted
    request = engine.add(random_ids(window - 3), params(window + 6))
    while request.status is not Status.FINISHED:
        engine.step()
        if request.table is None:
            break
        length, tables = request.num_computed, request.table.arrays()
        for layer in layers:
            group, kv = engine.runner.storage.layer(layer.index)
            # The next query, at `length`, sees from length - W + 1 on; it has no key yet.
            first = 0 if layer.window is None else max(0, length - window + 1)
            stored = gather_tokens(kv, tables[group], first, length - first)
            for part in range(2):
                truth = torch.cat([step[part] for step in computed[layer.index]], dim=1)[:, first:]
                assert torch.equal(stored[part], truth), f"layer {layer.index} at {length} tokens"
    want = hf_logits(model, request.token_ids[:-1])[window - 4 :]
    assert len(want) == window + 6 and request.num_tokens > 2 * window + 2
    assert (tap.of(request) - want).abs().max() <= 1e-4


@pytest.mark.parametrize("chunk", [7, 32, 512])
@pytest.mark.parametrize("kind", WINDOW)
def test_a_planted_key_is_seen_by_exactly_the_window(kind: str, chunk: int) -> None:
    """B29, B33: one key too many or too few, in prefill, chunks and decode (huggingface/transformers#39408,
    vllm-project/vllm#3385, pytorch/executorch#21857).

    A model of one sliding layer: when a token is replaced, exactly the W positions from it on change their logits.
    """
    window, length, planted = WINDOW[kind], 100, 40
    one = {"num_hidden_layers": 1, **({"layer_types": ["sliding_attention"]} if kind == "gemma3_text" else {})}
    model = make_tiny(kind, peaky=True, **one)
    ids = random_ids(length)
    other = [*ids[:planted], 7, *ids[planted + 1 :]]
    engine = make_engine(model, chunk_tokens=chunk)
    first, second = (torch.as_tensor(x) for x in score_all(engine, [ids, other]))
    changed = (first != second).any(1).nonzero().flatten().tolist()
    assert changed[0] == planted and changed[-1] == planted + window - 1
    decoded = []
    for prompt in (ids[: planted + 2], other[: planted + 2]):
        # The same tokens follow both prompts, whatever the model would say.
        tap = LogitTap(engine)
        engine.cache.clear()
        request = engine.add(prompt, params(window + 10))
        forced = iter(ids[planted + 2 :])
        while engine.has_work:
            engine.step()
            if request.status is not Status.FINISHED:
                request.token_ids[-1] = next(forced)
        decoded.append(tap.of(request))
    changed = (decoded[0] != decoded[1]).any(1).nonzero().flatten()
    # Row 0 of the decoded ones is position planted + 1.
    assert changed[-1] + planted + 1 == planted + window - 1


@pytest.mark.parametrize("kind", WINDOW)
def test_blocks_that_slid_out_are_given_back_while_decoding(kind: str) -> None:
    """B34: they are never released (vllm-project/vllm#34568): 10 W tokens are decoded."""
    window, chunk = WINDOW[kind], 40
    one = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    model = make_tiny(kind, **(one if kind == "gemma3_text" else {"num_hidden_layers": 1}))
    engine = make_engine(model, chunk_tokens=chunk)
    request = engine.add(random_ids(5 * window), params(10 * window))
    while engine.has_work:
        engine.step()
        if request.table is None:
            break
        *full, windowed = (np.count_nonzero(table) for table in request.table.arrays())
        within = window if not request.in_prefill and request.num_output_tokens > 1 else window + chunk
        assert windowed <= -(-within // B) + 2
        assert all(blocks == -(-request.num_computed // B) for blocks in full)
        assert engine.cache_stats()[-1].held == windowed


def test_the_smallest_window_pool_finishes_and_one_block_less_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """B35: admission counts the capped need, allocation the full one (vllm-project/vllm#7470, xLLM-AI/xllm#1689).

    A sliding-only model and a prompt of 20 W in ceil((W + chunk) / B) + 2 slots, the null block among them and no tail.
    The least that a user can ask for holds that many, and less is refused at start.
    """
    model, window, chunk = make_tiny("mistral", peaky=True), WINDOW["mistral"], 40
    slots = -(-(window + chunk) // B) + 2
    ids = random_ids(20 * window)
    with monkeypatch.context() as patch:
        patch.setattr(PoolShape, "_window_blocks", lambda *_: slots - 1)
        engine = make_engine(model, chunk_tokens=chunk, max_running=1)
    assert engine.cache_stats()[0].total == slots - 1
    tap = LogitTap(engine)
    request = engine.add(ids, params(3))
    run_all(engine)
    assert torch.equal(tap.of(request), cold_rows(model, ids, 3))
    shape = engine.partition.shape
    sizes = (1, chunk, shape.max_model_len)
    assert partition(shape.groups, shape.min_kv_bytes, *sizes).num_slots[0] >= slots
    with pytest.raises(LongctxError, match="set --kv-memory to at least"):
        partition(shape.groups, shape.min_kv_bytes - 1, *sizes)


@pytest.mark.parametrize("peaky", [False, True])
def test_a_fact_that_only_the_global_layer_reaches(peaky: bool) -> None:
    """B37: eviction or one mask for all layers of a hybrid (InternLM/lmdeploy#3772, Blaizzy/mlx-vlm#669).

    Six windows of prompt: the last logits are Hugging Face's, and follow the first token where Hugging Face's do.
    """
    model = make_tiny("gemma3_text", peaky=peaky)
    ids = random_ids(6 * 32 + 5, seed=2)
    engine = make_engine(model, chunk_tokens=48)
    last = []
    for first in (ids[0], 300):
        prompt = [first, *ids[1:]]
        got = torch.as_tensor(score_all(engine, [prompt])[0])
        assert (got - hf_logits(model, prompt)).abs().max() <= 1e-4
        last.append(got[-1])
    assert (last[0] - last[1]).abs().max() > 1e-6


@pytest.mark.parametrize("length", [95, 96, 97])
def test_an_exact_hit_computes_the_last_position_once(length: int) -> None:
    """B39: the exact hit on a rotated window feeds the last token twice (raullenchai/Rapid-MLX#1124)."""
    model = make_tiny("gemma3_text", peaky=True)
    engine = make_engine(model, chunk_tokens=40)
    ids = random_ids(length, seed=3)
    rows = []
    for computed in (length, 1, 1):
        tap = LogitTap(engine)
        request = engine.add(ids, params(1))
        run_all(engine)
        assert engine.last_step is not None
        [row] = engine.last_step.rows
        assert request.computed_tokens == computed
        assert row.start + row.n == length and (computed > 1 or row.start == length - 1)
        rows.append(tap.of(request))
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])


def test_windows_of_the_engine_are_the_models_layer_by_layer() -> None:
    """B36: a window on the wrong layers (huggingface/transformers#35896, InternLM/lmdeploy#3614,
    vllm-project/vllm#17772). Pools, the plan and the logits agree on who slides."""
    for kind, overrides, windows in (
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, [None, 16]),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, [None, None]),
        ("mistral", {"sliding_window": None}, [None, None]),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 3}, [32, 32, None] * 2),
    ):
        model = make_tiny(kind, peaky=True, **overrides)
        engine = make_engine(model, chunk_tokens=48)
        of_group = {layer: group.window for group in engine.groups for layer in group.layers}
        assert [of_group[layer] for layer in range(len(windows))] == windows
        ids = random_ids(90)
        assert (torch.as_tensor(score_all(engine, [ids])[0]) - hf_logits(model, ids)).abs().max() <= 1e-4
        generate(engine, ids, 3, ignore_eos=True)
