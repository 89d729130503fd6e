"""Penalties, bias and logprobs on whole engines: alone, beside mates, after a hit, a preemption, a cancellation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from longctx.engine import Engine
from longctx.errors import RequestError
from longctx.events import Event, FinishEvent, PromptLogprobs, TokenEvent, TokenLogprobs
from longctx.kv.memory import max_scored
from longctx.params import SamplingParams
from longctx.request import Request, ScoreSheet, Status
from tests.helpers.engine import LogitTap, make_engine
from tests.helpers.tiny import VOCAB, hf_logits, make_tiny, random_ids

PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}


@cache
def model_of(kind: str = "llama") -> PreTrainedModel:
    return make_tiny(kind, peaky=True)


def options(max_tokens: int = 24, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)


def run_events(engine: Engine, requests: Sequence[Request]) -> dict[str, list[Event]]:
    """Step to the end with the invariants checked; every request's events."""
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check_integrity()
    assert all(stats.held == 0 for stats in engine.cache_stats())
    return events


def logprobs_of(events: Sequence[Event]) -> list[TokenLogprobs | None]:
    return [event.logprobs for event in events if isinstance(event, TokenEvent)]


def end_of(events: Sequence[Event]) -> FinishEvent:
    assert isinstance(events[-1], FinishEvent)
    return events[-1]


def naive_answer(ids: list[int], params: SamplingParams, num_tokens: int) -> list[int]:
    """Greedy decoding by Hugging Face and the penalties' formulas, written as plainly as they are in the papers."""
    tokens = list(ids)
    for _ in range(num_tokens):
        x = hf_logits(model_of(), tokens)[-1].double()
        counts = Counter(tokens[len(ids) :])
        for token in range(VOCAB):
            if token in tokens:
                x[token] = (
                    x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
                )
            x[token] -= params.frequency_penalty * counts[token] + params.presence_penalty * (counts[token] > 0)
        for token, bias in params.logit_bias:
            x[token] += bias
        tokens.append(int(x.argmax()))
    return tokens[len(ids) :]


@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8},
        {"frequency_penalty": -0.5},
        {"logit_bias": {5: 3.0, 9: -100.0, 77: 2.5}},
        {**PENALTIES, "logit_bias": {5: 1.5}},
    ],
    ids=str,
)
def test_answers_are_those_of_the_formulas(more: dict[str, Any]) -> None:
    params = options(**more)
    ids = random_ids(40, seed=3)
    engine = make_engine(model_of(), chunk_tokens=16)
    request = engine.add(ids, params)
    run_events(engine, [request])
    answer = [*request.token_ids[40:]]
    assert answer == naive_answer(ids, params, 24)
    plain = engine.add(ids, options())
    run_events(engine, [plain])
    assert answer != [*plain.token_ids[40:]], "the option has an effect here"


MIXED = [
    {},
    {**PENALTIES, "logprobs": 3},
    {"temperature": 1.0, "seed": 4, "min_p": 0.05, **PENALTIES},
    {"temperature": 0.8, "seed": 5, "logit_bias": {3: 2.0}, "logprobs": 0, "prompt_logprobs": 2},
    {"logprobs": 5},
]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("kv_tokens", [2048, 208], ids=["roomy", "tight"])
def test_mates_hits_and_preemptions_change_nothing(kind: str, kv_tokens: int) -> None:
    """Five kinds of request together, in a pool that is large or forces preemptions: tokens and logprobs of each are
    bit for bit those it has alone, on an engine that has seen nothing before; greedy mates included."""
    alone = []
    for i, more in enumerate(MIXED):
        engine = make_engine(model_of(kind), deterministic=True)
        request = engine.add(random_ids(33 + i, seed=i % 2), options(**more))
        events = run_events(engine, [request])[request.id]
        alone.append((request.token_ids, logprobs_of(events), end_of(events).prompt_logprobs))
    engine = make_engine(model_of(kind), deterministic=True, chunk_tokens=24, kv_tokens=kv_tokens)
    for _ in range(2):
        requests = [engine.add(random_ids(33 + i, seed=i % 2), options(**more)) for i, more in enumerate(MIXED)]
        events_of = run_events(engine, requests)
        together = [
            (r.token_ids, logprobs_of(events_of[r.id]), end_of(events_of[r.id]).prompt_logprobs) for r in requests
        ]
        assert together == alone
        assert (sum(r.preemptions for r in requests) > 0) == (kv_tokens < 2048)
        assert requests[3].cached_tokens == 0, "a prompt that wants its logprobs takes nothing from the cache"
    assert requests[0].cached_tokens > 0


def test_options_of_a_mate_leave_greedy_logits_as_they_are() -> None:
    """Without determinism asked for: the logits beside penalties and logprobs are those beside plain mates."""
    rows = []
    for more in ({}, {**PENALTIES, "logprobs": 20}):
        engine = make_engine(model_of())
        tap = LogitTap(engine)
        requests = [engine.add(random_ids(30, seed=8), options()), engine.add(random_ids(31, seed=9), options(**more))]
        run_events(engine, requests)
        rows.append(tap.of(requests[0]))
    assert torch.equal(*rows)


def test_logprobs_are_the_models_own() -> None:
    """Before penalties, bias and temperature, whatever chose the token; the best are in falling order."""
    ids = random_ids(50, seed=6)
    params = options(12, temperature=2.0, seed=1, logprobs=4, logit_bias={11: 8.0}, **PENALTIES)
    engine = make_engine(model_of())
    request = engine.add(ids, params)
    rows = logprobs_of(run_events(engine, [request])[request.id])
    exact = hf_logits(model_of(), request.token_ids).double().log_softmax(-1)[len(ids) - 1 : -1]
    assert len(rows) == 12
    for token, row, exact_V in zip(request.token_ids[len(ids) :], rows, exact, strict=True):
        assert row is not None and abs(row.logprob - exact_V[token]) <= 1e-4
        best = exact_V.topk(4)
        assert row.top_ids == tuple(best.indices.tolist())
        assert np.abs(np.array(row.top_logprobs) - best.values.numpy()).max() <= 1e-4


def test_logprobs_zero_gives_the_token_alone_and_none_gives_nothing() -> None:
    engine = make_engine(model_of())
    requests = [engine.add(random_ids(9), options(3, logprobs=n)) for n in (0, None)]
    events = run_events(engine, requests)
    assert [row is not None and row.top_ids for row in logprobs_of(events[requests[0].id])] == [()] * 3
    assert logprobs_of(events[requests[1].id]) == [None] * 3
    assert all(end_of(e).prompt_logprobs is None for e in events.values())


@pytest.mark.parametrize("chunk_tokens", [7, 500])
def test_prompt_logprobs_cold_and_warm(chunk_tokens: int) -> None:
    """B91: with a prefix hit, a shape error or the tail's values for the first tokens (vllm-project/vllm#8268, #3251,
    #13105). As many as the prompt has tokens, the first None, the others the model's own, cold or warm."""
    ids = random_ids(120, seed=2)
    exact = hf_logits(model_of(), ids).double().log_softmax(-1)[:-1]
    engine = make_engine(model_of(), chunk_tokens=chunk_tokens)
    answers = []
    for _ in range(2):
        plain = engine.add(ids, options(5))
        run_events(engine, [plain])
        request = engine.add(ids, options(5, prompt_logprobs=3))
        end = end_of(run_events(engine, [request])[request.id])
        assert request.token_ids == plain.token_ids, "generation goes on as without"
        rows = end.prompt_logprobs
        assert isinstance(rows, PromptLogprobs) and len(rows) == 120 and rows[0] is None
        chosen = exact[torch.arange(119), torch.tensor(ids[1:])].numpy()
        assert np.abs(rows.logprobs - chosen).max() <= 1e-4
        best = exact.topk(3)
        assert np.array_equal(rows.top_ids, best.indices.numpy())
        assert np.abs(rows.top_logprobs - best.values.numpy()).max() <= 1e-4
        answers.append(rows)
        assert end.usage.cached_tokens == 0 and plain.cached_tokens == (0 if len(answers) == 1 else 119)
    assert answers[0] == answers[1]


def test_prompt_logprobs_are_the_scores_and_do_not_depend_on_chunks() -> None:
    ids = random_ids(90, seed=4)
    rows = []
    for chunk in (3, 16, 512):
        engine = make_engine(model_of("gemma3_text"), chunk_tokens=chunk)
        request = engine.add(ids, options(2, prompt_logprobs=1))
        rows.append(end_of(run_events(engine, [request])[request.id]).prompt_logprobs)
        sheet = ScoreSheet()
        engine.submit(score := engine.make_request(ids, SamplingParams(max_tokens=1), score=sheet))
        run_events(engine, [score])
        assert np.array_equal(np.concatenate(sheet.logprobs)[:-1], rows[-1].logprobs)
    assert rows[0] == rows[1] == rows[2]


def test_a_prompt_with_logprobs_waits_for_nobodys_blocks() -> None:
    """It takes nothing from the cache, so another's computation of the same prompt is no reason to wait."""
    engine = make_engine(model_of(), chunk_tokens=40)
    ids = random_ids(100, seed=1)
    first, plain = engine.add(ids, options(2)), engine.add(ids, options(2))
    scored = engine.add(ids, options(2, prompt_logprobs=0))
    engine.step()
    assert first.status is scored.status is Status.RUNNING and plain.status is Status.WAITING
    run_events(engine, [first, plain, scored])


def test_prompt_logprobs_go_on_after_a_preemption() -> None:
    """Preempted in the middle of its prompt, part of what it computed lost: every position once, and the same bits."""
    ids, params = random_ids(100, seed=2), options(4, prompt_logprobs=2)
    engine = make_engine(model_of(), chunk_tokens=2, kv_tokens=160)
    first = engine.add(random_ids(40, seed=1), options(60))
    request = engine.add(ids, params)
    end = end_of(run_events(engine, [first, request])[request.id])
    assert request.preemptions == 1 and request.computed_tokens < 2 * len(ids) - 40
    alone = make_engine(model_of())
    other = alone.add(ids, params)
    assert end.prompt_logprobs == end_of(run_events(alone, [other])[other.id]).prompt_logprobs


def test_a_prompt_of_one_token_with_logprobs() -> None:
    engine = make_engine(model_of())
    request = engine.add([5], options(2, prompt_logprobs=1, logprobs=1))
    end = end_of(run_events(engine, [request])[request.id])
    assert end.prompt_logprobs is not None and list(end.prompt_logprobs) == [None] and len(end.token_ids) == 2


@pytest.mark.parametrize("cancel_after", [1, 4])
def test_a_cancelled_request_has_the_prompts_logprobs_or_none(cancel_after: int) -> None:
    """Half a prompt's logprobs are no answer; once the prompt was read they are complete, however it ended."""
    engine = make_engine(model_of(), chunk_tokens=20)
    request = engine.add(random_ids(50), options(100, prompt_logprobs=0, logprobs=1, **PENALTIES))
    events = [e for _ in range(cancel_after) for e in engine.step()]
    engine.cancel(request.id)
    events += engine.step()
    end = end_of(events)
    assert end.reason == "cancelled" and len(end.token_ids) == max(0, cancel_after - 2)
    assert end.prompt_logprobs is None if cancel_after < 3 else len(end.prompt_logprobs or ()) == 50
    assert not engine.has_work
    again = engine.add(random_ids(50), options(3, prompt_logprobs=0))
    assert len(end_of(run_events(engine, [again])[again.id]).prompt_logprobs or ()) == 50


def test_padded_ids_are_in_no_logprobs() -> None:
    """Tokenizer 300, rows 320: probabilities of the 300 add up to one, and no padded id is among the best."""
    engine = make_engine(model_of(), vocab_limit=300)
    boost = torch.zeros(VOCAB)
    boost[300:] = 20.0
    engine.runner._model.lm_head.register_forward_hook(lambda _, __, logits: logits + boost)
    ids = random_ids(20, vocab=300)
    request = engine.add(ids, options(5, temperature=1.0, seed=0, logprobs=20, prompt_logprobs=20))
    events = run_events(engine, [request])[request.id]
    exact = hf_logits(model_of(), request.token_ids)[:, :300].double().log_softmax(-1)
    ours = [*list(end_of(events).prompt_logprobs or ())[1:], *logprobs_of(events)]
    assert len(ours) == 24
    for token, row, exact_V in zip(request.token_ids[1:], ours, exact, strict=False):
        assert row is not None and max(row.top_ids) < 300
        assert abs(row.logprob - exact_V[token]) <= 1e-4


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    engine = make_engine(model_of(), vocab_limit=300)
    engine.make_request([1, 2], options(1, logit_bias={299: 1.0}))
    for token in (300, 10**12):
        with pytest.raises(RequestError, match=f"{token}.*300 tokens"):
            engine.make_request([1, 2], options(1, logit_bias={5: 1.0, token: 1.0}))


def test_more_alternatives_than_the_vocabulary_has() -> None:
    engine = make_engine(model_of(), vocab_limit=6)
    request = engine.add([1, 2, 3], options(2, logprobs=20, prompt_logprobs=20))
    events = run_events(engine, [request])[request.id]
    assert [len(row.top_ids) for row in logprobs_of(events) if row] == [6, 6]
    rows = end_of(events).prompt_logprobs
    assert rows is not None and rows.top_ids.shape == (2, 6)


@pytest.mark.parametrize("more", [{"logprobs": 2, **PENALTIES}, {"prompt_logprobs": 1}], ids=["answer", "prompt"])
def test_logits_that_are_no_numbers_end_their_request_alone(more: dict[str, Any]) -> None:
    engine = make_engine(model_of(), chunk_tokens=64)
    ids = random_ids(40, seed=5)
    mate = engine.add(random_ids(30, seed=6), options(6, logprobs=1))
    victim = engine.add(ids, options(6, **more))
    forward = engine.runner._forward

    def broken(rows: Any, plan: Any, kept: Any) -> torch.Tensor:
        logits = forward(rows, plan, kept)
        last = rows[-1]
        if last.request_id == victim.id and (last.sample or last.targets is not None):
            logits[-1, 7] = float("nan")
        return logits

    engine.runner._forward = broken  # type: ignore[method-assign]
    events = run_events(engine, [mate, victim])
    end = end_of(events[victim.id])
    assert end.reason == "error" and end.prompt_logprobs is None
    assert "nan" in str(end.error) or "not numbers" in str(end.error)
    assert end_of(events[mate.id]).reason == "length"
    assert all(row is not None and np.isfinite(row.logprob) for row in logprobs_of(events[mate.id]))


def test_a_row_that_scores_and_samples_fails_by_either() -> None:
    """The last chunk of a prompt with logprobs: its tokens' logits may be broken while the last row is sound."""
    for bad in (-1, -2):
        engine = make_engine(model_of())
        forward = engine.runner._forward

        def broken(rows: Any, plan: Any, kept: Any, bad: int = bad, forward: Any = forward) -> torch.Tensor:
            logits = forward(rows, plan, kept)
            logits[bad, 7] = float("nan")
            return logits

        engine.runner._forward = broken  # type: ignore[method-assign]
        request = engine.add(random_ids(10), options(3, prompt_logprobs=0))
        end = end_of(run_events(engine, [request])[request.id])
        assert end.reason == "error" and f"position {10 + bad}" in str(end.error)


def test_scored_rows_of_a_step_stay_bounded_whoever_asks_for_them() -> None:
    """B89: three prompts that want logprobs beside each other share one bound of logits; nobody starves."""
    vocab = 200_000
    model = make_tiny("llama", num_hidden_layers=1, hidden_size=16, head_dim=16, vocab_size=vocab)
    engine = make_engine(model, kv_tokens=1024, max_chunk_tokens=256)
    bound = max_scored(vocab)
    requests = [engine.add(random_ids(150 - 20 * i, seed=i), options(2, prompt_logprobs=1)) for i in range(3)]
    ends: dict[str, FinishEvent] = {}
    while engine.has_work:
        before = {r.id: r.num_computed for r in requests}
        ends |= {e.request_id: e for e in engine.step() if isinstance(e, FinishEvent)}
        assert engine.last_step is not None
        assert sum(row.n for row in engine.last_step.rows if row.targets is not None) <= bound
        assert requests[0].num_computed > before[requests[0].id] or requests[0].id in ends, "the oldest always goes on"
    assert [len(ends[r.id].prompt_logprobs or ()) for r in requests] == [150, 130, 110]
