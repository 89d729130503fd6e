"""Who is taken, who comes first, and that whoever was taken also gets on."""

from __future__ import annotations

import pytest

from longctx.errors import RequestError
from longctx.params import SamplingParams
from longctx.request import Status
from tests.helpers.engine import make_engine, run_all
from tests.helpers.tiny import make_tiny, random_ids


def endless(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("decoding", [False, True])
def test_a_slow_machine_still_reads_long_prompts(decoding: bool) -> None:
    """Where the weights alone take longer than a step may, a prompt does not creep on by one token a step."""
    engine = make_engine(make_tiny("llama"))
    engine.scheduler._rates.largest_chunk = lambda *_, **__: 1
    if decoding:
        engine.add(random_ids(10), endless(200))
        engine.step()
    request = engine.add(random_ids(320, seed=1), endless(1))
    for _ in range(21):
        engine.step()
    assert request.status is Status.FINISHED


def test_who_was_queued_first_is_older_than_who_was_built_first() -> None:
    """A request that was built long ago and queued late does not take slots from those that run."""
    engine = make_engine(make_tiny("llama"), chunk_tokens=64, kv_tokens=160)
    late = engine.make_request(random_ids(60, seed=1), endless(60))
    early = engine.add(random_ids(60, seed=2), endless(60))
    engine.step()
    engine.submit(late)
    run_all(engine)
    assert early.preemptions == 0 and late.preemptions >= 1


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mistral"])
def test_plan_and_admission_agree_to_the_token(kind: str) -> None:
    """A plan of prompt + answer fits exactly when the request is taken."""
    engine = make_engine(make_tiny(kind, max_position_embeddings=300), kv_tokens=256)
    for prompt in range(250, 302):
        for answer in (1, 2, 17):
            try:
                engine.make_request(random_ids(prompt), endless(answer))
                taken = True
            except RequestError:
                taken = False
            assert (engine.plan(prompt + answer).verdict == "fits") == taken, (prompt, answer)
