"""`merge` is a commutative monoid, exact to rounding, and blind to strides and to its batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.attention.attend import merge_sink
from longctx.attention.state import AttnState, empty_state, merge
from tests.helpers.attention import assert_close, assert_same_bits


def random_state(seed: int, num_tokens: int = 5, num_heads: int = 3, dim: int = 4, span: float = 80.0) -> AttnState:
    """Some rows empty, scores up to +-span."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(num_tokens, num_heads, dim, generator=generator)
    lse = (torch.rand(num_tokens, num_heads, generator=generator) * 2 - 1) * span
    empty = torch.rand(num_tokens, num_heads, generator=generator) < 0.3
    return AttnState(out.masked_fill(empty.unsqueeze(-1), 0), lse.masked_fill(empty, -math.inf))


seeds = st.integers(0, 2**31)


@settings(max_examples=50, deadline=None)
@given(seeds, seeds, seeds)
def test_associative_commutative_identity(x, y, z):
    a, b, c = random_state(x), random_state(y), random_state(z)
    assert_same_bits(merge(a, b), merge(b, a))
    assert_close(merge(merge(a, b), c), merge(a, merge(b, c)), 2e-6)
    nothing = empty_state(5, 3, 4)
    assert_same_bits(merge(a, nothing), a)
    assert_same_bits(merge(nothing, a), a)


def test_empty_with_empty_is_empty():
    """flashinfer-ai/flashinfer#4401, pytorch/executorch#10466: -inf minus -inf made NaN of rows without a key."""
    nothing = empty_state(2, 3, 4)
    assert_same_bits(merge(nothing, nothing), nothing)


@pytest.mark.parametrize(("spread", "num_keys"), [(1.0, 16), (3.0, 2048)])
def test_512_spans_in_any_order_stay_exact(spread, num_keys):
    """The running state is fp32: 512 partial results in shuffled order agree with float64 to 3e-7.

    What is lost is the LSE's rounding, so a few keys that hold all weight (spread 3 over 16 keys a span) cost 2e-6.
    """
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(512, num_keys, generator=generator, dtype=torch.float64) * spread
    values = torch.randn(512, num_keys, 4, generator=generator, dtype=torch.float64)
    expected = (torch.softmax(scores.flatten(), 0)[:, None] * values.reshape(-1, 4)).sum(0)
    outs = torch.einsum("sn,snd->sd", torch.softmax(scores, 1), values).float()
    lses = torch.logsumexp(scores, 1).float()
    state = empty_state(1, 1, 4)
    for i in torch.randperm(512, generator=generator).tolist():
        state = merge(state, AttnState(outs[i].view(1, 1, 4), lses[i].view(1, 1)))
    assert (state.out.double() - expected).abs().max() <= 3e-7


def test_lse_is_a_natural_logarithm():
    """vllm-project/vllm#52796, flashinfer-ai/flashinfer#2113: base-2 LSE merged as if natural."""
    one = AttnState(torch.ones(1, 1, 1), torch.tensor([[math.log(3.0)]]))
    other = AttnState(torch.zeros(1, 1, 1), torch.tensor([[math.log(1.0)]]))
    merged = merge(one, other)
    assert merged.out.item() == pytest.approx(0.75, abs=1e-7)
    assert merged.lse.item() == pytest.approx(math.log(4.0), abs=1e-7)


@pytest.mark.parametrize(("num_heads", "group"), [(3, 1), (9, 3), (20, 4), (24, 8)])
def test_strided_operands_merge_as_contiguous_ones(num_heads, group):
    """vllm-project/vllm#22003, vllm-project/flash-attention#87: transposed LSE of grouped heads corrupted a merge."""
    a, b = random_state(1, 7, num_heads), random_state(2, 7, num_heads)

    def strided(state: AttnState) -> AttnState:
        grouped = state.lse.unflatten(1, (num_heads // group, group)).transpose(1, 2).contiguous()
        lse = grouped.transpose(1, 2).flatten(1).T.contiguous().T
        out = state.out.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        assert not out.is_contiguous() and not lse.is_contiguous()
        return AttnState(out, lse)

    assert_same_bits(merge(strided(a), b), merge(a, b))
    assert_same_bits(merge(strided(a), strided(b)), merge(a, b))


@pytest.mark.parametrize("num_heads", [1, 3, 4])
def test_a_rows_bits_do_not_depend_on_its_mates(num_heads):
    a, b = random_state(3, 700, num_heads, 16, 10.0), random_state(4, 700, num_heads, 16, 10.0)
    whole = merge(a, b)
    for begin, end in ((0, 1), (1, 4), (3, 20), (13, 270), (699, 700)):
        part = merge(AttnState(a.out[begin:end], a.lse[begin:end]), AttnState(b.out[begin:end], b.lse[begin:end]))
        assert_same_bits(part, AttnState(whole.out[begin:end], whole.lse[begin:end]))


def test_a_sink_is_one_more_key_without_value():
    state = random_state(5)
    sink = torch.tensor([0.5, -1.0, 30.0])
    closed = merge_sink(state, sink)
    weight = torch.sigmoid(state.lse - sink)
    assert_close(closed, AttnState(state.out * weight.unsqueeze(-1), torch.logaddexp(state.lse, sink)), 1e-6)
