"""Fault cases of chunked prefill: borders of chunks and blocks, and where a mixed step stores its tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longctx import forward
from longctx.errors import LongctxError
from longctx.params import SamplingParams
from longctx.request import Status
from tests.helpers.engine import LogitTap, generate, make_engine, run_all, score_all
from tests.helpers.scripted import cold_rows
from tests.helpers.tiny import hf_logits, make_tiny, random_ids

B = 16
CHUNKS = [1, B - 1, B, B + 1, 2 * B, 2 * B + 3, 512]
LENGTHS = [k * B + d for k in (1, 3) for d in (-1, 0, 1)]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_prompts_about_whole_blocks_in_chunks_about_whole_blocks(chunk: int) -> None:
    """B01: a last chunk that fills the last block exactly (vllm-project/vllm#7380).

    Every position's logits are Hugging Face's, a table has ceil(len / B) blocks at every step, and the first decoded
    token opens a new one exactly when the prompt fills its blocks.
    """
    model = make_tiny("llama", peaky=True)
    engine = make_engine(model, chunk_tokens=chunk)
    reference = hf_logits(model, random_ids(max(LENGTHS)))
    scores = score_all(engine, [random_ids(length) for length in LENGTHS])
    for length, score in zip(LENGTHS, scores, strict=True):
        assert (torch.as_tensor(score) - reference[:length]).abs().max() <= 1e-4
    tap = LogitTap(engine)
    for length in LENGTHS:
        engine.cache.clear()
        request = engine.add(random_ids(length), SamplingParams(max_tokens=4, ignore_eos=True))
        blocks_at = {}
        while request.status is not Status.FINISHED:
            engine.step()
            engine.check_integrity()
            if request.table is not None:
                blocks_at[request.num_computed] = request.table.num_blocks
        assert all(blocks == ceil_div(computed, B) for computed, blocks in blocks_at.items())
        assert blocks_at[length + 1] - blocks_at[length] == (length % B == 0)
        want = hf_logits(model, request.token_ids[:-1])[length - 1 :]
        assert (tap.of(request) - want).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_mixed_step_stores_every_token_in_its_own_place(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B03: slots of chunked requests computed wrongly (vllm-project/vllm#36580).

    One step holds a chunk at offset 37, a prompt at 0 and a decoding request: slots as a plain loop finds them, and
    the logits of each request are those of its run alone.
    """
    model = make_tiny(kind, peaky=True)
    engine = make_engine(model, chunk_tokens=37)
    tap = LogitTap(engine)
    prompts = {name: random_ids(n, seed=n) for name, n in (("decoding", 20), ("chunked", 80), ("new", 25))}
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    requests = [engine.add(prompts["decoding"], params)]
    engine.step()
    requests.append(engine.add(prompts["chunked"], params))
    engine.step()
    requests.append(engine.add(prompts["new"], params))

    stored: list[tuple[list[int], list[int]]] = []
    store = forward.store_tokens

    def noted(layer, slots_T, rows_T, k_KTD, v_KTD):
        assert slots_T.dtype == rows_T.dtype == np.int64
        stored.append((list(slots_T), list(rows_T)))
        store(layer, slots_T, rows_T, k_KTD, v_KTD)

    monkeypatch.setattr(forward, "store_tokens", noted)
    engine.step()
    monkeypatch.setattr(forward, "store_tokens", store)
    step = engine.last_step
    assert step is not None
    assert [(row.start, row.n) for row in step.rows] == [(21, 1), (37, 12), (0, 25)]
    assert len(stored) == len(model.model.layers)
    for layer, (slots, rows) in enumerate(stored):
        group = engine.runner.storage.layer(layer)[0]
        expected = []
        for row in step.rows:
            for position in range(row.start, row.start + row.n):
                expected.append((int(row.tables[group][position // B]), position % B))
        assert list(zip(slots, rows, strict=True)) == expected
    run_all(engine)
    for request, ids in zip(requests, prompts.values(), strict=True):
        assert torch.equal(tap.of(request), cold_rows(model, ids, 6))


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_of_nothing_is_refused_at_start(chunk: int) -> None:
    """B04: a configuration that can never run is accepted (sgl-project/sglang#36344, #36417)."""
    with pytest.raises(LongctxError, match=rf"chunk_tokens must be positive, got {chunk}"):
        make_engine(make_tiny("llama"), chunk_tokens=chunk)


@pytest.mark.parametrize(("chunk", "max_len"), [(1, 64), (B - 1, 200), (B + 1, 200), (128, 200), (5000, 200)])
def test_a_prompt_one_token_longer_than_the_chunk_is_served(chunk: int, max_len: int) -> None:
    """B04: a 129-token request with chunks of 128 never runs (sgl-project/sglang#36344, #36417)."""
    engine = make_engine(make_tiny("llama", max_position_embeddings=max_len), chunk_tokens=chunk)
    request = engine.add(random_ids(min(chunk + 1, max_len - 1)), SamplingParams(max_tokens=1))
    idle = 0
    while engine.has_work:
        engine.step()
        assert engine.last_step is not None
        idle = 0 if engine.last_step.num_tokens else idle + 1
        assert idle < 3
    assert request.num_output_tokens == 1


@pytest.mark.parametrize("chunk", [8, 512])
def test_no_index_goes_past_a_prompt_of_29_that_shares_16(chunk: int) -> None:
    """B05: tokens counted before the look-up, so that prefill reads past the end (GeeeekExplorer/nano-vllm#210, #218).

    Sixteen tokens are warm: 13 are scheduled, at positions 16 to 28.
    """
    engine = make_engine(make_tiny("llama"), chunk_tokens=chunk)
    ids = random_ids(29)
    generate(engine, ids[:B], 1, ignore_eos=True)
    request = engine.add(ids, SamplingParams(max_tokens=1))
    positions: list[int] = []
    while engine.has_work:
        engine.step()
        assert engine.last_step is not None
        positions += [p for row in engine.last_step.rows for p in range(row.start, row.start + row.n)]
    assert request.cached_tokens == B and request.num_output_tokens == 1
    assert positions == list(range(B, 29))
