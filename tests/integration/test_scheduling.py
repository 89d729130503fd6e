"""Steps by hand: fairness, preemption, cancellation, progress, and what must never stall."""

from __future__ import annotations

import numpy as np
import pytest

from longctx.errors import DoesNotFitError, QueueFullError, RequestError
from longctx.events import FinishEvent, ProgressEvent, TokenEvent
from longctx.params import SamplingParams
from longctx.request import Status
from tests.helpers.engine import generate, make_engine, run_all
from tests.helpers.tiny import make_tiny, random_ids


def free_of(engine) -> list[int]:
    return [stats.free + stats.cached for stats in engine.cache_stats()]


def endless(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_every_step_computes_something_while_work_waits() -> None:
    """A request longer than the chunk by one token is not left waiting for ever (sgl-project/sglang#36344)."""
    for chunk in (1, 15, 16, 17, 5000):
        engine = make_engine(make_tiny("llama"), chunk_tokens=chunk)
        engine.add(random_ids(33), endless(2))
        while engine.has_work:
            engine.step()
            assert engine.last_step.num_tokens > 0


@pytest.mark.parametrize("length", [31, 32, 33])
def test_tokens_scheduled_are_prompt_less_hit(length: int) -> None:
    """The tokens of a step are counted after the cache lookup (GeeeekExplorer/nano-vllm#210)."""
    for chunk in (8, 512):
        engine = make_engine(make_tiny("llama"), chunk_tokens=chunk)
        ids = random_ids(length)
        generate(engine, ids[:16], 1)
        request = engine.add(ids, endless(1))
        scheduled = 0
        while engine.has_work:
            engine.step()
            scheduled += engine.last_step.num_tokens
            assert all(row.start + row.n <= length for row in engine.last_step.rows)
        assert request.cached_tokens == 16
        assert scheduled == length - 16


def test_middle_chunks_have_no_logits_and_no_tokens() -> None:
    """The LM head sees one row per sampling sequence, none in a middle chunk (ROCm/vllm#204, mlx-vlm#1732)."""
    engine = make_engine(make_tiny("llama"), chunk_tokens=16)
    rows: list[int] = []
    head = engine.runner._model.lm_head
    head.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[-2]))
    engine.add(random_ids(100), SamplingParams(max_tokens=3, temperature=1.0, top_k=5, top_p=0.9, seed=1))
    tokens = []
    while engine.has_work:
        tokens += [e for e in engine.step() if isinstance(e, TokenEvent)]
    assert rows == [0] * 6 + [1, 1, 1]
    assert [t.index for t in tokens] == [0, 1, 2]


def test_short_requests_pass_a_long_prefill() -> None:
    """Short first tokens come within 5 steps, a decoding stream never pauses, the long one hardly notices
    (sgl-project/sglang#34554, vllm-project/vllm#57951)."""
    engine = make_engine(make_tiny("llama"), chunk_tokens=16, kv_tokens=8192)
    stream = engine.add(random_ids(10, seed=1), endless(400))
    engine.step()
    long = engine.add(random_ids(16 * 150, seed=2), endless(1))
    for _ in range(10):
        engine.step()
    shorts = [engine.add(random_ids(20, seed=10 + i), endless(1)) for i in range(3)]
    steps = waited = 0
    while any(s.first_token_s is None for s in shorts):
        waited += 1
        before = stream.num_tokens
        engine.step()
        assert stream.num_tokens == before + 1
        assert waited <= 5
    while long.status is not Status.FINISHED:
        steps += 1
        engine.step()
    assert steps + waited + 10 <= 150 * 1.25


@pytest.mark.parametrize(("count", "share"), [(2, 0.6), (4, 0.4)])
def test_preemption_does_not_ping_pong(count: int, share: float) -> None:
    """Requests that do not fit together finish with bounded recomputation; the oldest is never preempted
    (vllm-project/vllm#25538)."""
    pool = 640
    engine = make_engine(make_tiny("llama"), chunk_tokens=64, kv_tokens=pool)
    total = int(pool * share)
    requests = [engine.add(random_ids(total // 2, seed=i), endless(total // 2)) for i in range(count)]
    run_all(engine)
    minimum = sum(r.num_tokens - 1 for r in requests)
    assert all(r.num_output_tokens == total // 2 for r in requests)
    assert requests[0].preemptions == 0
    assert max(r.preemptions for r in requests) <= 3
    assert sum(r.computed_tokens for r in requests) <= 3 * minimum


def test_a_preempted_request_finds_its_own_blocks() -> None:
    """What was computed stays as cache entries, generated tokens included, and the output is that of a big pool
    (LMCache/LMCache#1969)."""
    model = make_tiny("llama", peaky=True)
    outputs = []
    for kv_tokens in (7 * 16, 4096):
        engine = make_engine(model, chunk_tokens=64, kv_tokens=kv_tokens)
        requests = [engine.add(random_ids(n, seed=n), endless(24)) for n in (34, 35)]
        run_all(engine)
        outputs.append([r.token_ids for r in requests])
        if kv_tokens == 7 * 16:
            assert requests[1].preemptions >= 1
            assert requests[1].computed_tokens < 2 * (35 + 24)
    assert outputs[0] == outputs[1]


def test_never_fitting_requests_are_refused_at_once() -> None:
    """'No room ever' is an error before any work; the next request is served (vllm-project/vllm#39734)."""
    engine = make_engine(make_tiny("llama"), kv_tokens=49 * 16)
    with pytest.raises(DoesNotFitError, match=r"1,001 tokens.*785"):
        engine.add(random_ids(1000), endless(1))
    with pytest.raises(DoesNotFitError):
        engine.add(random_ids(40 * 16), endless(20 * 16))
    assert generate(engine, random_ids(20), 3).reason == "length"


def test_the_last_token_of_the_model_is_reachable() -> None:
    """max 64, prompt 50: 14 tokens are exactly 14, 15 are refused with both numbers (sgl-project/sglang#33814)."""
    engine = make_engine(make_tiny("llama", max_position_embeddings=64))
    event = generate(engine, random_ids(50), 14, ignore_eos=True)
    assert (event.reason, event.usage.completion_tokens) == ("length", 14)
    with pytest.raises(RequestError, match="64"):
        engine.add(random_ids(50), endless(15))
    event = generate(engine, random_ids(50), None, ignore_eos=True)
    assert event.usage.completion_tokens == 14


def test_cache_off_needs_only_its_own_blocks_and_keeps_none() -> None:
    """With caching off a 10-chunk prompt fits a pool of its size and leaves nothing (sgl-project/sglang#36855)."""
    engine = make_engine(make_tiny("llama"), chunk_tokens=16, kv_tokens=11 * 16, prefix_cache=False)
    before = [stats.free for stats in engine.cache_stats()]
    request = engine.add(random_ids(160), endless(1))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.cache_stats()[0].held)
    assert request.status is Status.FINISHED and most <= 10
    assert [stats.free for stats in engine.cache_stats()] == before
    assert all(stats.cached == 0 for stats in engine.cache_stats())


def test_the_queue_is_bounded() -> None:
    engine = make_engine(make_tiny("llama"), max_queue=2)
    for i in range(2):
        engine.add(random_ids(10, seed=i), endless(1))
    with pytest.raises(QueueFullError, match="2"):
        engine.add(random_ids(10, seed=9), endless(1))
    run_all(engine)


@pytest.mark.parametrize("when", range(8))
def test_cancelling_at_any_chunk_leaks_nothing(when: int) -> None:
    """Cancel before, between and inside chunks, many times: the pool is whole afterwards (sglang#36926)."""
    engine = make_engine(make_tiny("gemma3_text"), chunk_tokens=16)
    before = free_of(engine)
    for i in range(5):
        request = engine.add(random_ids(90, seed=i), endless(4))
        for _ in range(when):
            engine.step()
        engine.cancel(request.id)
        finished = run_all(engine)
        if request.id in finished:
            assert finished[request.id].reason in ("cancelled", "length")
    assert free_of(engine) == before


def test_cancel_is_honoured_between_layers() -> None:
    """A cancelled prefill stops inside the forward pass, and its earlier chunks stay as cache entries."""
    engine = make_engine(make_tiny("smollm3"), chunk_tokens=32)
    request = engine.add(random_ids(200), endless(1))
    engine.step()
    layers: list[float] = []
    on_layer = engine._on_layer

    def cancel_after_first_layer(step, fraction):
        layers.append(fraction)
        engine.cancel(request.id)
        on_layer(step, fraction)

    engine._on_layer = cancel_after_first_layer
    engine.step()
    assert layers == [0.25]
    engine._on_layer = on_layer
    [event] = engine.step()
    assert isinstance(event, FinishEvent) and event.reason == "cancelled"
    again = engine.add(random_ids(200), endless(1))
    run_all(engine)
    assert again.cached_tokens == 32


def test_progress_comes_per_layer_and_never_falls() -> None:
    engine = make_engine(make_tiny("smollm3"), chunk_tokens=32)
    seen: list[ProgressEvent] = []
    engine.on_progress = seen.append
    request = engine.add(random_ids(100), endless(1))
    events = []
    while engine.has_work:
        events += engine.step()
    assert len(seen) == 4 * 4
    processed = [e.processed for e in seen]
    assert processed == sorted(processed) and processed[-1] == 100
    assert all(e.total == 100 and e.stage == "prefill" for e in seen)
    assert request.reported == 100


def test_same_prompts_together_are_computed_once() -> None:
    """Six requests with one document compute it once; nobody reads a block before it exists (vllm#37152)."""
    for kind in ("llama", "gemma3_text"):
        model = make_tiny(kind, peaky=True)
        document = random_ids(16 * 8, seed=1)
        prompts = [[*document, *random_ids(5, seed=50 + i)] for i in range(6)]
        engine = make_engine(model, chunk_tokens=32)
        requests = [engine.add(prompts[0], endless(3))]
        engine.step()
        for prompt in prompts[1:]:
            requests.append(engine.add(prompt, endless(3)))
            engine.step()
        run_all(engine)
        alone = [generate(make_engine(model), prompt, 3, ignore_eos=True).token_ids for prompt in prompts]
        assert [tuple(r.token_ids[r.num_prompt_tokens :]) for r in requests] == alone
        assert sum(r.computed_tokens for r in requests) <= len(document) + 6 * (5 + 3) + 16


def test_window_blocks_are_bounded_at_every_step() -> None:
    """Sliding layers hold at most ceil((W + chunk) / B) + 2 blocks, global ones everything (vllm#34568)."""
    chunk, block, window = 40, 16, 32
    engine = make_engine(make_tiny("gemma3_text"), chunk_tokens=chunk)
    request = engine.add(random_ids(10 * window), endless(5 * window))
    while engine.has_work:
        engine.step()
        if request.table is None:
            break
        full, windowed = (np.count_nonzero(table) for table in request.table.arrays())
        assert windowed <= -(-(window + chunk) // block) + 2
        assert full == -(-request.num_computed // block)


def test_the_smallest_window_pool_finishes_a_long_prompt() -> None:
    """Admission and allocation agree on a sliding-only model's need (vllm-project/vllm#7470)."""
    model = make_tiny("mistral")
    engine = make_engine(model, chunk_tokens=40, max_running=1)
    request = engine.add(random_ids(20 * 24), endless(3))
    run_all(engine)
    assert request.num_output_tokens == 3
    wide = generate(make_engine(model), random_ids(20 * 24), 3, ignore_eos=True)
    assert tuple(request.token_ids[-3:]) == wide.token_ids


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mistral"])
def test_a_whole_hit_recomputes_exactly_the_last_token(kind: str) -> None:
    """A prompt of exactly 4 blocks, three times, then one token more and one less (vllm#11186, Rapid-MLX#1124)."""
    model = make_tiny(kind, peaky=True)
    engine = make_engine(model)
    ids = random_ids(65, seed=8)
    for prompt, computed in ((ids[:64], 64), (ids[:64], 1), (ids[:64], 1), (ids, 1), (ids[:63], 1)):
        request = engine.add(prompt, endless(1))
        run_all(engine)
        assert request.computed_tokens == computed
        cold = generate(make_engine(model), prompt, 1, ignore_eos=True)
        assert tuple(request.token_ids[-1:]) == cold.token_ids


def test_a_failed_step_ends_its_requests_and_not_the_engine() -> None:
    engine = make_engine(make_tiny("llama"))
    request = engine.add(random_ids(20), endless(2))
    forward = engine.runner._forward
    engine.runner._forward = lambda *_: 1 / 0
    [event] = [e for e in engine.step() if isinstance(e, FinishEvent)]
    assert event.request_id == request.id and event.reason == "error" and "ZeroDivisionError" in (event.error or "")
    engine.runner._forward = forward
    assert generate(engine, random_ids(20), 2, ignore_eos=True).reason == "length"


@pytest.mark.parametrize("ids", [[], [-1], [320], [5, 10**9]])
def test_bad_token_ids_are_refused(ids: list[int]) -> None:
    engine = make_engine(make_tiny("llama"))
    with pytest.raises(RequestError):
        engine.add(ids, endless(1))
