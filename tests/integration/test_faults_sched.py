"""Fault cases of scheduling: who is refused at once, who waits without harm to others, and an idle engine's rest."""

from __future__ import annotations

import time

import pytest

from longctx.errors import DoesNotFitError
from longctx.events import FinishEvent
from longctx.loop import EngineLoop
from longctx.params import SamplingParams
from longctx.request import Status
from tests.helpers.engine import make_engine, run_all
from tests.helpers.tiny import make_tiny, random_ids


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_a_request_that_can_never_fit_is_refused_and_costs_nothing() -> None:
    """B100: 'no room now' and 'no room ever' are one answer (vllm-project/vllm#39734, #35541).

    A pool of 49 blocks: 63 blocks of prompt, and 40 that decode to 60, are refused before any work; the one behind
    them is served, and then the engine's thread sleeps.
    """
    engine = make_engine(make_tiny("llama"), kv_tokens=49 * 16)
    loop = EngineLoop(engine)
    try:
        for prompt, new in ((63 * 16, 1), (40 * 16, 20 * 16)):
            with pytest.raises(DoesNotFitError, match="49"):
                engine.make_request(random_ids(prompt), params(new))
        *_, last = loop.submit(engine.make_request(random_ids(20), params(3)))
        assert isinstance(last, FinishEvent) and last.reason == "length"
        used, start = time.process_time(), time.monotonic()
        time.sleep(0.3)
        assert time.process_time() - used < 0.2 * (time.monotonic() - start)
    finally:
        loop.stop()


def test_those_who_wait_for_a_block_take_no_place_from_those_who_could_run() -> None:
    """B108: deferred requests count as running, so nobody is admitted (vllm-project/vllm#53130).

    Four places: one reads a document, four wait for its blocks, four others behind them run meanwhile.
    """
    engine = make_engine(make_tiny("llama"), chunk_tokens=32, max_running=4)
    document = random_ids(16 * 60, seed=1)
    reader = engine.add([*document, 5], params(1))
    engine.step()
    waiting = [engine.add([*document, 10 + i], params(1)) for i in range(4)]
    ready = [engine.add(random_ids(20, seed=20 + i), params(2)) for i in range(4)]
    while any(r.status is not Status.FINISHED for r in ready):
        engine.step()
        assert engine.last_step is not None and engine.last_step.num_tokens > 0
    assert reader.status is Status.RUNNING and all(r.status is Status.WAITING for r in waiting)
    run_all(engine)
    assert all(r.num_output_tokens == 1 and r.cached_tokens == len(document) for r in waiting)


def test_a_long_prefill_alone_is_not_slowed_and_beside_others_hardly() -> None:
    """B104: a long prefill takes whole steps, or gives away too much (sgl-project/sglang#34554, #34623,
    vllm-project/vllm#57951, #57413). 200 chunks; three short requests come at the tenth beside a decoding stream."""
    model = make_tiny("llama", num_hidden_layers=1)
    chunk = 8

    def steps(others: bool) -> int:
        engine = make_engine(model, chunk_tokens=chunk, kv_tokens=4096)
        stream = engine.add(random_ids(10, seed=1), params(400)) if others else None
        if stream:
            while stream.in_prefill:
                engine.step()
        long = engine.add(random_ids(200 * chunk, seed=2), params(1))
        shorts: list = []
        for count in range(1, 1000):
            if others and count == 11:
                shorts = [engine.add(random_ids(20, seed=10 + i), params(1)) for i in range(3)]
            before = stream.num_tokens if stream else 0
            engine.step()
            assert stream is None or stream.num_tokens == before + 1
            if count == 11 + 3 * 5:
                assert all(s.first_token_s is not None for s in shorts)
            if long.status is Status.FINISHED:
                return count
        raise AssertionError("the long request did not finish")

    assert steps(False) == 200
    assert steps(True) <= 250


@pytest.mark.parametrize(("count", "share"), [(2, 0.6), (4, 0.4)])
@pytest.mark.parametrize("new", [40, 120])
def test_requests_that_do_not_fit_together_do_not_chase_each_other(count: int, share: float, new: int) -> None:
    """B106: a resumed request gets its next chunk only and is preempted again (vllm-project/vllm#25538,
    inference-sim/inference-sim#297, #529). Long prompts with short answers are the worst for it."""
    pool = 640
    engine = make_engine(make_tiny("llama", num_hidden_layers=1), chunk_tokens=64, kv_tokens=pool)
    prompt = int(pool * share) - new
    requests = [engine.add(random_ids(prompt, seed=i), params(new)) for i in range(count)]
    run_all(engine)
    assert all(r.num_output_tokens == new for r in requests)
    assert requests[0].preemptions == 0 and max(r.preemptions for r in requests) <= 3
    assert sum(r.computed_tokens for r in requests) <= 3 * sum(r.num_tokens - 1 for r in requests)
