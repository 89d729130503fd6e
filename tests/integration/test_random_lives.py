"""Random lives of many requests in tiny pools: whatever happens, every answer is what the prompt gives alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import longctx.forward
import longctx.runner
from longctx.engine import Engine
from longctx.errors import DoesNotFitError, QueueFullError
from longctx.events import FinishEvent, ProgressEvent, TokenEvent, TokenLogprobs
from longctx.params import SamplingParams
from longctx.request import Request, ScoreSheet
from tests.helpers.engine import make_engine, run_all
from tests.helpers.tiny import make_tiny, random_ids

VARIANTS: dict[str, dict[str, Any]] = {
    "streaming": {"attention_variant": "streaming", "window": 21, "sinks": 9},
    "local-chunk": {"attention_variant": "local-chunk", "local_chunk": 24},
}
KINDS = ("llama", "gemma3_text", "mistral", "phi3_longrope", "llama_dynamic", *VARIANTS)
BUSY_STEPS = 50
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3}


@dataclass
class Life:
    request: Request
    prompt: list[int]
    sheet: ScoreSheet | None
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


@cache
def model_of(kind: str):
    return make_tiny("llama" if kind in VARIANTS else kind, peaky=True)


@cache
def alone(kind: str) -> Engine:
    options = {"kv_tokens": 4096, "prefix_cache": False, "chunk_tokens": 512, "deterministic": True}
    return make_engine(model_of(kind), **options, **VARIANTS.get(kind, {}))


def small_engine(rng: random.Random, kind: str) -> Engine:
    block, chunk = rng.choice([1, 7, 16, 32]), rng.choice([1, 3, 16, 40, 64])
    return make_engine(
        model_of(kind),
        kv_tokens=chunk + 3 * block + rng.choice([0, 40, 200, 500]),
        block_tokens=block,
        chunk_tokens=chunk,
        max_running=rng.choice([1, 2, 3, 4]),
        max_queue=6,
        deterministic=True,
        prefix_cache=rng.random() < 0.9,
        tail_every=rng.choice([16, 8192]),
        **VARIANTS.get(kind, {}),
    )


def arrive(rng: random.Random, engine: Engine) -> Life | None:
    """One more request: a piece of one of three documents and a short end of its own."""
    prompt = random_ids(rng.choice([1, 15, 16, 17, 33, 64, 100, 128]), seed=rng.randrange(3))
    prompt += random_ids(rng.choice([0, 1, 5, 20]), seed=rng.randrange(3))
    sheet = ScoreSheet(want_logits=True) if rng.random() < 0.15 else None
    wishes = rng.choice([{}, {}, PENALTIES, {"logit_bias": {7: 1.0}, "min_p": 0.1}])
    params = SamplingParams(
        max_tokens=rng.choice([1, 2, 8, 30, None]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(5),
        ignore_eos=True,
        logprobs=rng.choice([None, None, 0, 2]),
        prompt_logprobs=rng.choice([0, 2]) if sheet is None and rng.random() < 0.15 else None,
        **wishes,
    )
    try:
        salt = rng.choice([None, None, "", "a"])
        request = engine.make_request(prompt, params, cache_salt=salt, score=sheet)
        engine.submit(request)
    except (DoesNotFitError, QueueFullError):
        return None
    return Life(request, prompt, sheet)


def step_with_trouble(rng: random.Random, engine: Engine) -> list:
    """One step in which a copy, a layer or the sampler fails, keys are spoilt, or somebody is cancelled."""
    where, countdown = rng.choice(["copy", "store", "spoil", "sample", "cancel"]), rng.randrange(1, 8)
    store, on_layer = longctx.forward.store_tokens, engine._on_layer
    victim = rng.choice([*engine.scheduler.running, None])

    def fail(*_):
        raise RuntimeError(where)

    def store_badly(layer, slots, rows, k, v):
        nonlocal countdown
        countdown -= 1
        store(layer, slots, rows, k, v * float("nan") if where == "spoil" and countdown == 0 else v)
        if where == "store" and countdown == 0:
            fail()

    def cancel(step, fraction):
        if victim is not None:
            engine.cancel(victim.id)
        on_layer(step, fraction)

    with pytest.MonkeyPatch.context() as patch:
        if where == "copy":
            patch.setattr(engine.runner.storage, "copy_rows", fail)
        elif where == "sample":
            patch.setattr(longctx.runner, "sample_rows", fail)
        elif where == "cancel":
            patch.setattr(engine, "_on_layer", cancel)
        else:
            patch.setattr(longctx.forward, "store_tokens", store_badly)
        return engine.step()


def check_answer(kind: str, life: Life, event: FinishEvent) -> None:
    prompt, request = life.prompt, life.request
    assert 0 <= event.usage.cached_tokens < len(prompt)
    if event.reason in ("cancelled", "error"):
        return
    positions = len(prompt) + max(0, len(event.token_ids) - 1)
    assert event.computed_tokens + event.usage.cached_tokens >= positions
    assert request.preemptions or event.computed_tokens + event.usage.cached_tokens == positions
    engine = alone(kind)
    sheet = ScoreSheet(want_logits=True) if life.sheet is not None else None
    params = replace(request.params, max_tokens=max(1, len(event.token_ids)), seed=request.seed)
    reference = engine.make_request(prompt, params, score=sheet)
    reference.regime = request.regime
    engine.submit(reference)
    events = []
    while engine.has_work:
        events += engine.step()
    assert life.logprobs == [e.logprobs for e in events if isinstance(e, TokenEvent)]
    assert event.prompt_logprobs == events[-1].prompt_logprobs
    if sheet is not None:
        assert np.array_equal(np.concatenate(life.sheet.logits), np.concatenate(sheet.logits))
    else:
        assert request.token_ids == reference.token_ids


def again(engine: Engine, document: int) -> tuple[Life, FinishEvent]:
    prompt = random_ids(min(120, engine.partition.longest_request - 2), seed=document)
    request = engine.add(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    end = run_all(engine)[request.id]
    return Life(request, prompt, None, [None] * len(end.token_ids)), end


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [False, True], ids=["well", "trouble"])
@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_every_answer_is_what_the_prompt_gives_alone(seed: int, trouble: bool) -> None:
    """After every step the pool is whole, work goes on, progress never falls; at the end nothing is left."""
    kind, rng = KINDS[seed % len(KINDS)], random.Random(f"{seed}{trouble}")
    engine = small_engine(rng, kind)
    lives: dict[str, Life] = {}
    reported: dict[str, int] = {}
    idle_steps, steps = 0, 0
    while steps < BUSY_STEPS or engine.has_work:
        steps += 1
        assert steps < 10_000, "it never ends"
        while steps < BUSY_STEPS and rng.random() < 0.4:
            life = arrive(rng, engine)
            if life is not None:
                lives[life.request.id] = life
        if lives and rng.random() < 0.1:
            engine.cancel(rng.choice(list(lives)))
        disturbed = trouble and steps < BUSY_STEPS and rng.random() < 0.15
        had_work = engine.has_work
        events = step_with_trouble(rng, engine) if disturbed else engine.step()
        engine.check_integrity()
        assert engine.last_step is not None
        stalled = had_work and not events and engine.last_step.num_tokens == 0
        idle_steps = idle_steps + 1 if stalled else 0
        assert idle_steps < 2, "work waits and nothing is computed"
        for event in events:
            if isinstance(event, ProgressEvent):
                assert event.processed >= reported.get(event.request_id, 0)
                reported[event.request_id] = event.processed
            elif isinstance(event, TokenEvent):
                lives[event.request_id].logprobs.append(event.logprobs)
            elif isinstance(event, FinishEvent):
                assert trouble or event.reason != "error", event.error
                check_answer(kind, lives.pop(event.request_id), event)
    for document in range(3):
        # Spoilt keys of a request that was cancelled before its logits showed it cost one more request, not two.
        check_answer(kind, *again(engine, document))
        life, event = again(engine, document)
        assert event.reason == "length"
        check_answer(kind, life, event)
    assert not lives and not engine.scheduler.live and not engine.cache._live and not engine.cache._pending
    assert all(stats.held == 0 for stats in engine.cache_stats())
