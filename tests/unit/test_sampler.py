"""The sampler: its contract, its agreement with a plain sort, and what a row of a large vocabulary costs."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx.errors import EngineError
from longctx.params import SamplingParams
from longctx.sampler import SamplingError, _inverse_cdf, _kth_largest, _largest, _nucleus, _uniform, sample, sample_rows
from tests.helpers.sampler_contract import SamplerContract, step_row

LARGE_VOCAB = 262_144


class TestSampler(SamplerContract):
    def sample_rows(self, logits_RV, rows, vocab_limit):
        return sample_rows(logits_RV, rows, vocab_limit)


def test_the_stream_is_frozen():
    """A seed given today must give the same text with the next version: the draws are Philox 4x64, pinned here."""
    assert [_uniform(*at) for at in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 2_000_000))] == [
        0.19464547604465843,
        0.8757702910694817,
        0.9203043833391499,
        0.5013118026449428,
    ]


def test_draws_are_uniform():
    draws = np.array([_uniform(seed, position) for seed in range(20) for position in range(200)])
    assert draws.min() >= 0.0 and draws.max() < 1.0
    counts, _ = np.histogram(draws, 16, (0.0, 1.0))
    assert np.sum((counts - 250.0) ** 2 / 250.0) < 15 + 4 * np.sqrt(30)
    by_seed = draws.reshape(20, 200)
    assert abs(np.corrcoef(by_seed) - np.eye(20)).max() < 0.3, "neighbouring seeds are unrelated"
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.06, "neighbouring positions are unrelated"


@given(st.lists(st.sampled_from([0.0, 1e-30, 0.1, 0.1000001, 0.25, 0.7, 1.0]), min_size=1, max_size=40), st.data())
def test_top_k_equals_a_stable_sort(values, data):
    x_N = np.array(values, np.float32)
    k = data.draw(st.integers(1, len(values)))
    expected = np.sort(np.argsort(-x_N, kind="stable")[:k])
    assert _largest(x_N, k, _kth_largest(x_N, k)).tolist() == expected.tolist()


def test_top_k_above_the_small_limit_equals_a_stable_sort():
    x_N = np.random.default_rng(0).integers(0, 500, 5000).astype(np.float32)
    for k in (999, 1000, 1001, 2500, 4999):
        expected = np.sort(np.argsort(-x_N, kind="stable")[:k])
        assert _largest(x_N, k, _kth_largest(x_N, k)).tolist() == expected.tolist()


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 6.0, 40.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-12])
def test_top_p_equals_a_sort_of_everything(spread, top_p):
    """The bucketed search keeps the smallest set of the best that reaches top_p, as a full descending sort does."""
    x = np.random.default_rng(3).normal(size=20_000).astype(np.float32) * np.float32(spread)
    weight_N = np.exp(x - x.max())
    kept = _nucleus(weight_N, top_p)
    order = np.argsort(-weight_N, kind="stable")
    assert kept.tolist() == np.sort(order[: len(kept)]).tolist()
    mass = np.cumsum(weight_N[order], dtype=np.float64) / weight_N.sum(dtype=np.float64)
    assert mass[len(kept) - 1] >= top_p - 1e-12
    assert len(kept) == 1 or mass[len(kept) - 2] <= top_p + 1e-12


def test_a_weight_of_zero_is_never_drawn():
    weight_N = np.array([0.0, 0.5, 0.0, 0.5, 0.0], np.float32)
    assert [_inverse_cdf(weight_N, u) for u in (0.0, 0.49, 0.5, 0.99, 1 - 2.0**-53, 1.0)] == [1, 1, 3, 3, 3, 3]


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 511, 512, 513, 1024, 5000]), st.sampled_from([0.0, 0.5, 0.99]))
def test_a_draw_is_that_of_a_plain_running_sum(seed, size, zeros):
    """Blocks make no difference, whatever weights are zero, and the last block too."""
    rng = np.random.default_rng(seed)
    weight_N = rng.random(size).astype(np.float32)
    weight_N[rng.random(size) < zeros] = 0.0
    weight_N[rng.integers(size)] = 1.0
    mass = np.cumsum(weight_N, dtype=np.float64)
    for u in (0.0, *rng.random(20), 1 - 2.0**-53):
        index = _inverse_cdf(weight_N, u)
        assert weight_N[index] > 0
        assert mass[index] - weight_N[index] <= u * mass[-1] + 1e-9 and mass[index] >= u * mass[-1] - 1e-9


def test_half_precision_logits():
    logits = torch.tensor([0.0, 3.0, 1.0])
    for dtype in (torch.float16, torch.bfloat16):
        assert sample(logits.to(dtype), SamplingParams(), 0, 1, 3) == 1


def test_the_error_travels_to_another_process():
    error = pickle.loads(pickle.dumps(SamplingError("no token")))
    assert isinstance(error, EngineError)
    assert str(error) == "no token"


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 50},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "logit_bias": {5: 1.0}},
    ],
    ids=str,
)
def test_memory_is_a_few_rows_whatever_the_batch(kwargs):
    """Nothing of size rows x vocabulary is copied: the peak does not depend on the number of rows."""
    vocab, num_rows = 65_536, 64
    logits_RV = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(0))
    rows = [
        step_row(SamplingParams(**kwargs), seed, prompt=range(0, vocab, 8), output=[1, 2]) for seed in range(num_rows)
    ]
    sample_rows(logits_RV[:1], rows[:1], vocab)
    tracemalloc.start()
    sample_rows(logits_RV, rows, vocab)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 8 * 4 * vocab, f"{peak / (4 * vocab):.1f} rows of fp32"


def test_a_large_vocabulary_sorts_a_small_part_of_itself(monkeypatch):
    """Top-p over 262,144 tokens, counted instead of timed: the share of the row that is sorted."""
    sorted_items = []
    sort = np.sort
    monkeypatch.setattr(np, "sort", lambda x: (sorted_items.append(len(x)), sort(x))[1])
    logits = torch.randn(LARGE_VOCAB, generator=torch.Generator().manual_seed(5))
    for spread in (1.0, 3.0, 8.0):
        sample(logits * spread, SamplingParams(temperature=1.0, top_p=0.9), 0, 1, LARGE_VOCAB)
    assert len(sorted_items) == 3
    assert max(sorted_items) < LARGE_VOCAB // 50, sorted_items


def test_greedy_without_options_copies_nothing():
    """The row is read where it lies: no copy of 262,144 logits for a token that is simply the best."""
    logits = torch.randn(LARGE_VOCAB, generator=torch.Generator().manual_seed(0))
    sample(logits, SamplingParams(), 0, 1, LARGE_VOCAB)
    tracemalloc.start()
    sample(logits, SamplingParams(), 0, 1, LARGE_VOCAB)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
