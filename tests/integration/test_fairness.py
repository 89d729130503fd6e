"""Who gets how much of a step: streams keep their pace beside long prompts, and no prompt starves another."""

from __future__ import annotations

import pytest

from longctx.engine import Engine
from longctx.machine import MachineSpeed
from longctx.params import SamplingParams
from longctx.rates import Rates
from longctx.request import Request, Status
from tests.helpers.engine import make_engine
from tests.helpers.tiny import make_tiny, random_ids


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def predictable(engine: Engine, monkeypatch: pytest.MonkeyPatch, slowdown: float = 1.0) -> Rates:
    """Let the engine believe for ever that it runs on a machine of known speed."""
    speed = MachineSpeed(1e9 / slowdown, 1e8 / slowdown)
    rates = Rates.initial(engine.loaded.spec, speed)
    engine.rates = engine.scheduler._rates = rates
    monkeypatch.setattr(rates, "observe", lambda *_: None)
    return rates


def step(engine: Engine) -> list[tuple[int, int]]:
    engine.step()
    assert engine.last_step is not None
    return [(row.start, row.n) for row in engine.last_step.rows]


def decoding(engine: Engine, count: int, max_tokens: int) -> list[Request]:
    streams = [engine.add(random_ids(8, seed=i), params(max_tokens)) for i in range(count)]
    while any(stream.in_prefill for stream in streams):
        engine.step()
    return streams


@pytest.mark.parametrize("target_s", [0.04, 0.1])
@pytest.mark.parametrize("streams", [1, 3])
def test_steps_stay_under_the_target_while_somebody_decodes(monkeypatch, target_s: float, streams: int) -> None:
    """Every step with a stream in it is predicted to take at most the target, and is filled up to near it; alone again,
    the prompt gets the long steps back."""
    engine = make_engine(
        make_tiny("llama"), kv_tokens=8192, max_chunk_tokens=1024, itl_target_s=target_s, step_seconds=1.0
    )
    rates = predictable(engine, monkeypatch)
    talking = decoding(engine, streams, 30)
    prompt = engine.add(random_ids(3000, seed=9), params(1))
    mixed, alone = [], []
    while prompt.status is not Status.FINISHED:
        rows = step(engine)
        (mixed if any(n == 1 for _, n in rows) else alone).append(rows)
    limited = [rows for rows in mixed if sum(n for _, n in rows) > streams]
    assert len(limited) > 5 and all(rates.step_seconds(rows) <= target_s for rows in limited)
    # Chunks are multiples of 16 tokens: the room that is left is less than one more.
    for rows in limited[:-1]:
        more = [(start, n + 16 if n > 1 else n) for start, n in rows]
        assert rates.step_seconds(more) > target_s or max(n for _, n in more) > 1024
    assert alone and max(n for rows in alone for _, n in rows) > max(n for rows in limited for _, n in rows)
    assert all(stream.num_output_tokens == 30 for stream in talking)


def test_every_step_beside_a_prompt_has_a_token_for_every_stream(monkeypatch) -> None:
    engine = make_engine(make_tiny("llama"), kv_tokens=8192, itl_target_s=0.02)
    predictable(engine, monkeypatch)
    talking = decoding(engine, 3, 100)
    prompt = engine.add(random_ids(2000, seed=9), params(1))
    while prompt.status is not Status.FINISHED and talking[0].status is not Status.FINISHED:
        before = [stream.num_tokens for stream in talking]
        step(engine)
        assert [stream.num_tokens for stream in talking] == [n + 1 for n in before]


def test_a_target_that_cannot_be_kept_does_not_stop_the_prompt(monkeypatch) -> None:
    """Where even one token takes longer than the target, a prompt still gets a few tokens of every step."""
    engine = make_engine(make_tiny("llama"), itl_target_s=1e-6)
    predictable(engine, monkeypatch, slowdown=100.0)
    decoding(engine, 1, 200)
    prompt = engine.add(random_ids(320, seed=9), params(1))
    for _ in range(320 // 16):
        rows = step(engine)
        assert len(rows) == 2
    assert prompt.num_output_tokens == 1


def steps_until_done(engine: Engine, requests: list[Request]) -> dict[str, int]:
    done: dict[str, int] = {}
    for count in range(1, 10_000):
        engine.step()
        for request in requests:
            if request.status is Status.FINISHED:
                done.setdefault(request.id, count)
        if len(done) == len(requests):
            return done
    raise AssertionError("somebody starves")


@pytest.mark.parametrize("lengths", [(1600, 1600), (1600, 800), (800, 1600), (1600, 1600, 1600)])
def test_long_prompts_do_not_starve_each_other(lengths: tuple[int, ...]) -> None:
    """The oldest keeps a quarter of every step whatever comes, the work is never more than the sum, and each is done
    when an equal share of the machine would have done it, or within the reserve of it."""
    chunk = 16
    engine = make_engine(make_tiny("llama", num_hidden_layers=1), kv_tokens=8192, chunk_tokens=chunk)
    requests = [engine.add(random_ids(n, seed=i), params(1)) for i, n in enumerate(lengths)]
    done = steps_until_done(engine, requests)
    assert max(done.values()) <= sum(lengths) // chunk + len(lengths)
    for request, n in zip(requests, lengths, strict=True):
        share = sum(min(n, other) for other in lengths) // chunk
        assert done[request.id] <= 4 / 3 * share + len(lengths), f"{n} tokens were done after {done[request.id]} steps"


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    """Short prompts that never stop coming take three quarters of every step, and no more."""
    chunk = 16
    engine = make_engine(make_tiny("llama", num_hidden_layers=1), kv_tokens=8192, chunk_tokens=chunk, max_running=4)
    long = engine.add(random_ids(800, seed=1), params(1))
    engine.step()
    for count in range(1, 1000):
        while len(engine.scheduler.live) < 6:
            engine.add(random_ids(40, seed=100 + 7 * count + len(engine.scheduler.live)), params(1))
        engine.step()
        if long.status is Status.FINISHED:
            break
    assert count <= 4 * 800 // chunk + 4


def test_the_second_oldest_is_not_starved_either() -> None:
    """Whoever is overtaken by shorter ones becomes the oldest in the end."""
    chunk = 16
    engine = make_engine(make_tiny("llama", num_hidden_layers=1), kv_tokens=8192, chunk_tokens=chunk, max_running=4)
    longs = [engine.add(random_ids(480, seed=i), params(1)) for i in (1, 2)]
    engine.step()
    for count in range(1, 1000):
        while len(engine.scheduler.live) < 6:
            engine.add(random_ids(40, seed=100 + 7 * count + len(engine.scheduler.live)), params(1))
        engine.step()
        if all(long.status is Status.FINISHED for long in longs):
            break
    assert count <= 4 * 2 * 480 // chunk + 8


def test_waiting_for_a_document_ends_with_the_one_who_reads_it() -> None:
    """Those who wait for another's blocks go on when it is cancelled, from what it had computed."""
    engine = make_engine(make_tiny("llama"), chunk_tokens=32)
    document = random_ids(640, seed=1)
    reader = engine.add([*document, 5], params(1))
    for _ in range(5):
        engine.step()
    others = [engine.add([*document, 6 + i], params(1)) for i in range(3)]
    engine.step()
    assert all(other.status is Status.WAITING for other in others)
    engine.cancel(reader.id)
    steps_until_done(engine, others)
    computed = reader.computed_tokens + sum(other.computed_tokens for other in others)
    assert computed <= 1.05 * len(document)
