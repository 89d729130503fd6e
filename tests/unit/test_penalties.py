"""Token counts for penalties: right at any length, sparse, and never read from the start again."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx.params import SamplingParams
from longctx.penalties import TokenCounts, adjusted
from longctx.sampler import sample_rows
from tests.helpers.sampler_contract import step_row

ALL = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
IDS = st.lists(st.integers(0, 30), max_size=60)


@given(IDS.filter(bool), IDS)
def test_counts_are_those_of_a_plain_count(prompt: list[int], output: list[int]) -> None:
    counts = TokenCounts(ALL, prompt)
    for i, token in enumerate(output):
        counts.add(token)
        if i % 7 == 0:
            counts.snapshot()
    history = counts.snapshot()
    assert sorted(history.seen.tolist()) == sorted({*prompt, *output})
    assert dict(zip(history.output_ids.tolist(), history.output_counts.tolist(), strict=True)) == Counter(output)


def test_a_history_given_out_never_changes() -> None:
    """A step may travel to another process late, or be computed again."""
    counts = TokenCounts(ALL, [5, 1, 5])
    given_out = []
    for token in [1, 9, 9, 2, 5, *range(40, 90), 9]:
        history = counts.snapshot()
        given_out.append((history, pickle.loads(pickle.dumps(history))))
        counts.add(token)
    for history, copy in given_out:
        for name in ("seen", "output_ids", "output_counts"):
            assert np.array_equal(getattr(history, name), getattr(copy, name))


@pytest.mark.parametrize(
    ("options", "seen", "counted"),
    [
        ({"repetition_penalty": 1.1}, {1, 2, 3}, set()),
        ({"presence_penalty": 0.1}, set(), {3}),
        ({"frequency_penalty": 0.1}, set(), {3}),
    ],
)
def test_only_what_is_needed_is_counted(options: dict[str, float], seen: set[int], counted: set[int]) -> None:
    counts = TokenCounts(SamplingParams(**options), [1, 2])
    counts.add(3)
    history = counts.snapshot()
    assert ({*history.seen.tolist()}, {*history.output_ids.tolist()}) == (seen, counted)


def test_a_long_prompt_is_read_once_and_penalized_to_its_first_token() -> None:
    """B93: dense counts [requests x vocabulary], or a look back of 20 tokens only (vllm-project/vllm#29756,
    jundot/omlx#3011). Eight requests with prompts of 64K of 262,144 ids: sparse state, and a token that was last seen
    60,000 positions ago is still penalized."""
    vocab, length = 262_144, 65_536
    rng = np.random.default_rng(0)
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2)
    prompts = [[7, *rng.integers(8, vocab, length).tolist()] for _ in range(8)]
    counts = [TokenCounts(params, prompt) for prompt in prompts]
    for each in counts:
        for token in range(500):
            each.add(token % 3)
    rows = [step_row(params) for _ in counts]
    logits_RV = torch.zeros(8, vocab)
    logits_RV[:, 7], logits_RV[:, 5] = 1.2, 1.0

    def step() -> list[int]:
        rows_now = [
            type(row)(**{**vars(row), "history": each.snapshot()}) for row, each in zip(rows, counts, strict=True)
        ]
        assert all(len(pickle.dumps(row)) <= 4 * length + 10_000 for row in rows_now)
        return sample_rows(logits_RV, rows_now, vocab)

    assert step() == [5] * 8
    tracemalloc.start()
    step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 3 * 4 * vocab, "a copy of one row at a time, and no counts per vocabulary entry"
    start_s = time.thread_time()
    for _ in range(20):
        for row, each in zip(rows, counts, strict=True):
            adjusted(logits_RV[0].numpy(), row.params, each.snapshot())
    assert (time.thread_time() - start_s) / 20 < 0.1, "a step of eight; some milliseconds are usual"


def test_the_cost_of_a_token_does_not_grow_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = TokenCounts(ALL, list(range(100_000)))
    monkeypatch.setattr(np, "unique", None)
    monkeypatch.setattr(np, "concatenate", None)
    counts.add(100_001)
    room = counts._seen._room
    for token in range(100_002, 100_500):
        counts.add(token)
        assert counts.snapshot().seen.base is room, "no new array for each token"


def test_penalties_keep_what_is_no_number() -> None:
    logits = np.array([-np.inf, np.nan, np.inf, 3e38, -3e38], np.float32)
    counts = TokenCounts(ALL, [0, 1, 2, 3, 4])
    for token in range(5):
        counts.add(token)
    y = adjusted(logits, SamplingParams(repetition_penalty=100.0), counts.snapshot())
    assert y[0] == -np.inf and np.isnan(y[1]) and y[2] == np.inf
    assert y[3] == np.float32(3e38) / np.float32(100) and y[4] == -np.inf
