"""Logprobs of rows: against float64, ties, padded ids, broken rows, and what they take."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx.logprobs import best_ids, logprob_rows, token_logprobs


def test_logprobs_are_those_of_float64() -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0)) * 8
    logits[3] += 1e4
    targets = np.array([0, 2999, 17, 5, 6])
    exact = logits.double().log_softmax(-1)
    rows = logprob_rows(logits, targets, 4, 3000)
    assert np.abs(rows.logprobs - exact[torch.arange(5), torch.as_tensor(targets)].numpy()).max() <= 1e-3
    top = exact.topk(4)
    assert np.array_equal(rows.top_ids, top.indices.numpy())
    assert np.abs(rows.top_logprobs - top.values.numpy()).max() <= 1e-3
    normal = np.abs(rows.logprobs - exact[torch.arange(5), torch.as_tensor(targets)].numpy())[[0, 1, 2, 4]]
    assert normal.max() <= 1e-5


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 5, 20]), st.sampled_from([20, 300, 2047, 2048, 5120, 20_000]))
def test_the_best_are_those_of_a_stable_sort(seed: int, k: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    x_N = rng.integers(0, rng.choice([2, 50, 10**6]), size).astype(np.float32)
    x_N[rng.random(size) < 0.1] = -np.inf
    assert best_ids(x_N, k).tolist() == np.argsort(-x_N, kind="stable")[:k].tolist()


def test_equals_come_in_the_order_of_their_ids() -> None:
    row = token_logprobs(torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]), 3, 4, 5)
    assert row.top_ids == (1, 2, 4, 0)
    assert row.top_logprobs[0] == row.top_logprobs[2] > row.top_logprobs[3] == row.logprob


def test_padded_ids_have_no_part_in_the_sum() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 50.0, torch.nan]])
    rows = logprob_rows(logits, np.array([2]), 20, 3)
    expected = torch.tensor([1.0, 2.0, 3.0]).log_softmax(0)
    assert rows.top_ids.tolist() == [[2, 1, 0]]
    assert np.allclose(rows.top_logprobs[0], expected.flip(0)) and np.isclose(rows.logprobs[0], expected[2])
    assert logprob_rows(logits, np.array([3]), 0, 3).logprobs[0] == -np.inf, "a token that is never produced"


@pytest.mark.parametrize("bad", [[0.0, torch.nan, 1.0], [0.0, torch.inf, 1.0], [-torch.inf] * 3])
def test_a_broken_row_gives_nan_and_its_mates_their_numbers(bad: list[float]) -> None:
    good = [0.0, 1.0, 2.0]
    rows = logprob_rows(torch.tensor([good, bad, good]), np.array([2, 2, 2]), 2, 3)
    assert np.isnan(rows.logprobs).tolist() == [False, True, False]
    assert rows.logprobs[0] == rows.logprobs[2] and rows.top_ids[[0, 2]].tolist() == [[2, 1]] * 2


def test_an_impossible_token_has_minus_infinity() -> None:
    row = token_logprobs(torch.tensor([0.0, -torch.inf, 0.0]), 1, 3, 3)
    assert row.logprob == -np.inf and row.top_logprobs[2] == -np.inf and row.top_ids == (0, 2, 1)


def test_a_row_depends_on_nothing_but_itself() -> None:
    logits = torch.randn(7, 5000, generator=torch.Generator().manual_seed(1))
    together = logprob_rows(logits, np.arange(7), 5, 4999)
    for i in range(7):
        alone = logprob_rows(logits[i : i + 1].clone(), np.array([i]), 5, 4999)
        assert alone.logprobs[0] == together.logprobs[i]
        assert np.array_equal(alone.top_logprobs[0], together.top_logprobs[i])
    half = logprob_rows(logits.to(torch.bfloat16), np.arange(7), 0, 5000)
    assert np.abs(half.logprobs - together.logprobs).max() < 0.1


def test_memory_is_a_few_rows_however_many_there_are() -> None:
    """B89: logits and their fp32 log-softmax at once (vllm-project/vllm#5907); here one row's copy at a time."""
    vocab = 65_536
    logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(0))
    logprob_rows(logits[:1], np.zeros(1, np.int64), 20, vocab)
    tracemalloc.start()
    logprob_rows(logits, np.zeros(64, np.int64), 20, vocab)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 3 * 4 * vocab, f"{peak / (4 * vocab):.1f} rows of fp32"
