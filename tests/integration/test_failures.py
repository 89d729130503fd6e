"""What goes wrong inside a step: only the requests it concerns fail, and what they leave behind is never believed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import longctx.forward
from longctx.errors import DoesNotFitError, RequestError
from longctx.events import FinishEvent
from longctx.params import SamplingParams
from longctx.request import ScoreSheet, Status
from tests.helpers.engine import LogitTap, generate, make_engine, run_all, score_all
from tests.helpers.tiny import make_tiny, random_ids


def endless(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def alone(model, ids: list[int], max_tokens: int, **options: Any) -> tuple[int, ...]:
    return generate(make_engine(model, **options), ids, max_tokens, ignore_eos=True).token_ids


def submit_score(engine, ids: list[int]):
    sheet = ScoreSheet(want_logits=True)
    request = engine.make_request(ids, SamplingParams(max_tokens=1), score=sheet)
    engine.submit(request)
    return request, sheet


def test_rows_that_were_never_copied_are_not_believed() -> None:
    """A step fails before its copies: a request admitted in it that has no row in it starts again."""
    model = make_tiny("llama", peaky=True)
    engine = make_engine(model, chunk_tokens=2)
    document = random_ids(40, seed=1)
    generate(engine, document, 1)
    for n, seed in ((50, 9), (20, 3)):
        engine.add(random_ids(n, seed=seed), endless(2))
        engine.step()
    late = engine.add([*document[:25], *random_ids(60, seed=4)], endless(3))
    copy_rows = engine.runner.storage.copy_rows
    engine.runner.storage.copy_rows = lambda _: 1 / 0
    events = engine.step()
    engine.check_integrity()
    engine.runner.storage.copy_rows = copy_rows
    assert engine.last_step.copies and late.id not in {row.request_id for row in engine.last_step.rows}
    assert [e.reason for e in events if isinstance(e, FinishEvent)] == ["error", "error"]
    run_all(engine)
    assert tuple(late.token_ids[-3:]) == alone(model, late.token_ids[:-3], 3)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    ("kv_format", "score"), [("auto", False), ("auto", True), ("int8", False), ("int4", True), ("fp8_e4m3", False)]
)
def test_numbers_that_are_none_do_not_stay_in_the_cache(kind: str, kv_format: str, score: bool, monkeypatch) -> None:
    """Keys and values of a request whose logits were NaN are forgotten, its hit too: the same prompt works again."""
    model = make_tiny(kind, peaky=True)
    # Prefill kernels only, where codes matter: those of decode differ by their rounding.
    options = {"kv_format": kv_format, "deterministic": kv_format != "auto"}
    engine = make_engine(model, chunk_tokens=16, **options)
    ids, store = random_ids(60, seed=5), longctx.forward.store_tokens
    hit = generate(engine, ids[:40], 1)
    assert hit.reason == "length"
    calls = []

    def spoilt(layer, slots, rows, k, v):
        calls.append(None)
        store(layer, slots, rows, k, v * float("nan") if len(calls) == 3 else v)

    monkeypatch.setattr(longctx.forward, "store_tokens", spoilt)
    request = submit_score(engine, ids)[0] if score else engine.add(ids, endless(2))
    failed = run_all(engine)[request.id]
    assert failed.reason == "error" and ("not numbers" in failed.error or "nan" in failed.error)
    again = engine.add(ids, endless(3))
    run_all(engine)
    assert again.cached_tokens == 0 and tuple(again.token_ids[60:]) == alone(model, ids, 3, **options)


def test_scoring_goes_on_after_a_preemption() -> None:
    """A preempted scoring request gives every position exactly once, and goes on from what is still cached."""
    model = make_tiny("llama", peaky=True)
    engine = make_engine(model, chunk_tokens=2, kv_tokens=160)
    first = engine.add(random_ids(40, seed=1), endless(60))
    ids = random_ids(100, seed=2)
    request, sheet = submit_score(engine, ids)
    run_all(engine)
    assert request.preemptions == 1 and first.preemptions == 0
    assert request.computed_tokens < 2 * len(ids) - 40
    wanted = score_all(make_engine(model), [ids])[0]
    assert np.array_equal(np.concatenate(sheet.logits), wanted)
    assert len(np.concatenate(sheet.logprobs)) == len(ids)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_scoring_up_to_the_limits(kind: str) -> None:
    """Scoring stores its last token too: what fills the pool finishes, one token more is refused at once."""
    engine = make_engine(make_tiny(kind, max_position_embeddings=96), kv_tokens=64, chunk_tokens=16)
    for n in (1, 63, 64, 96):
        if kind == "llama" and n > 64:
            with pytest.raises(DoesNotFitError, match="64 tokens"):
                submit_score(engine, random_ids(n))
            with pytest.raises(DoesNotFitError):
                submit_score(engine, random_ids(65))
        else:
            request, sheet = submit_score(engine, random_ids(n))
            run_all(engine, max_steps=50)
            assert request.status is Status.FINISHED and len(np.concatenate(sheet.logits)) == n
    with pytest.raises(RequestError, match="97 tokens and the model 96 positions"):
        submit_score(engine, random_ids(97))


@pytest.mark.parametrize(("bad_first", "kv_format"), [(True, "auto"), (False, "auto"), (True, "int8"), (False, "int4")])
def test_numbers_lost_in_one_row_do_not_reach_its_mate(bad_first: bool, kv_format: str) -> None:
    """NaN values of one decoding request end it with an error; the other's logits are bit-equal to a run alone."""
    model, params = make_tiny("llama", peaky=True), SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [random_ids(40, seed=1), random_ids(40, seed=2)]
    engine = make_engine(model, chunk_tokens=64, kv_format=kv_format)
    tap = LogitTap(engine)
    requests = [engine.add(ids, params) for ids in prompts]
    while any(r.num_output_tokens < 3 for r in requests):
        engine.step()
    bad, mate = requests if bad_first else requests[::-1]
    for layer in range(2):
        group, kv = engine.runner.storage.layer(layer)
        lost = kv.v if kv.v_scale is None else kv.v_scale
        lost[bad.table.columns[group][0]] = float("nan")
    finished = run_all(engine)
    assert finished[bad.id].reason == "error" and finished[mate.id].reason == "length"
    other = make_engine(model, chunk_tokens=64, kv_format=kv_format)
    tap_alone = LogitTap(other)
    request = other.add(prompts[1 if bad_first else 0], params)
    run_all(other)
    assert torch.equal(tap.of(mate), tap_alone.of(request))
