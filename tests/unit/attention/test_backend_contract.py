"""The promises of `Backend`, held by every backend in the registry: a new one is tested by being listed there."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from longctx.attention.attend import attend
from longctx.attention.naive import naive_state
from longctx.attention.registry import BACKENDS
from longctx.attention.span import AttnParams, DecodeBatch, Span
from longctx.attention.state import AttnState
from tests.helpers.attention import assert_close, assert_same_bits, decode, prefill, random_sequence, stored

# (query heads, kv heads, head dim): every group size in use, odd head counts.
SHAPES = [(3, 3, 16), (9, 3, 16), (12, 3, 16), (24, 3, 16), (4, 1, 40)]
WINDOWS = [None, 1, 2, 31, 32, 33, 100, 512, 3000]


# What needs a GPU has tests of its own (tests/kernels, tests/gpu): in an interpreter these would take minutes.
@pytest.fixture(params=[name for name in BACKENDS if name != "triton"])
def backend(request):
    return BACKENDS[request.param]()


def oracle(q_THD, positions, sequence, params) -> AttnState:
    return naive_state(q_THD, torch.as_tensor(positions), sequence.k, sequence.v, 0, params)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_and_decode_are_attention(backend, shape, window):
    """GQA ratios 1, 3, 4, 8 with odd head counts (vllm-project/vllm#22003), every window, unwritten rows poisoned."""
    num_heads, num_kv_heads, dim = shape
    sequence = random_sequence(2500, num_kv_heads, dim)
    params = AttnParams(dim**-0.5, window)
    start = 1990
    q_THD = torch.randn(len(sequence) - start, num_heads, dim) * 2
    rows = [0, 1, 57, 58, 59, 60, 300, len(q_THD) - 1]
    expected = oracle(q_THD[rows], [start + r for r in rows], sequence, params)
    whole = prefill(backend, q_THD, start, sequence, params)
    assert_close(AttnState(whole.out[rows], whole.lse[rows]), expected)
    assert_close(decode(backend, q_THD[rows], [start + r for r in rows], sequence, params), expected)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("window", "block"), [(None, 16), (33, 16), (100, 48), (None, 256)])
def test_a_rows_bits_do_not_depend_on_its_chunk(backend, window, block, softcap):
    sequence = random_sequence(2600, 3, 16, block_tokens=block)
    params = AttnParams(0.25, window, softcap)
    q_THD = torch.randn(len(sequence), 9, 16) * 2
    whole = prefill(backend, q_THD, 0, sequence, params)
    rng = np.random.default_rng(0)
    for chunk in (1, 3, 16, 37, 255, 256, 257, 700, None):
        # Small chunks cross the border of the first tile; the others begin anywhere in the first block.
        begin = 2048 - 2 * chunk if chunk and chunk < 100 else int(rng.integers(0, 200))
        end = min(len(sequence), begin + 5 * chunk) if chunk and chunk < 100 else len(sequence)
        while begin < end:
            stop = min(end, begin + (chunk or int(rng.integers(1, 900))))
            part = prefill(backend, q_THD[begin:stop], begin, sequence, params)
            assert_same_bits(part, AttnState(whole.out[begin:stop], whole.lse[begin:stop]))
            begin = stop


@pytest.mark.parametrize("window", [None, 300])
def test_decode_does_not_depend_on_batch_mates(backend, window):
    """Alone or in company, with a wider block table, with other threads: the same bits."""
    sequence = random_sequence(2500, 3, 16)
    params = AttnParams(0.25, window)
    positions = [0, 255, 256, 1000, 2499]
    q_RHD = torch.randn(len(positions), 9, 16)
    together = decode(backend, q_RHD, positions, sequence, params)
    for row, position in enumerate(positions):
        table = np.pad(sequence.view.table, (0, 7))[None]
        batch = DecodeBatch(table, np.array([position]))
        alone = backend.decode_state(q_RHD[row : row + 1], sequence.view.layer, batch, params)
        assert_same_bits(alone, AttnState(together.out[row : row + 1], together.lse[row : row + 1]))


@pytest.mark.parametrize("kind", ["prefill", "chunk of 7", "decode"])
def test_the_window_has_exactly_its_keys(backend, kind):
    """huggingface/transformers#39408, vllm-project/vllm#3385: a window one token too wide or narrow.

    A planted key takes all attention of every row that sees it: at i-W it must not be seen, at i-W+1 it must.
    """
    window, planted, length = 40, 300, 400
    k_KSD = torch.randn(1, length, 16) * 0.1
    v_KSD = torch.randn(1, length, 16)
    k_KSD[0, planted, 0] = 1000.0
    v_KSD[0, planted] = 77.0
    sequence = stored(k_KSD, v_KSD)
    q_THD = torch.ones(length, 4, 16)
    params = AttnParams(0.25, window)
    if kind == "decode":
        state = decode(backend, q_THD, list(range(length)), sequence, params)
    else:
        step = length if kind == "prefill" else 7
        parts = [prefill(backend, q_THD[s : s + step], s, sequence, params) for s in range(0, length, step)]
        state = AttnState(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))
    is_marker = (state.out - 77.0).abs().amax((1, 2)) < 1e-3
    assert is_marker.nonzero().flatten().tolist() == list(range(planted, planted + window))


def test_each_row_of_a_chunk_has_its_own_window(backend):
    """pytorch/executorch#21857: one bound for the whole chunk let rows see more than W keys.

    For each row the values outside its own window are replaced: its result must not change, bit for bit.
    """
    window, start, length = 50, 220, 300
    k_KSD, v_KSD = torch.randn(1, length, 16), torch.randn(1, length, 16)
    q_THD = torch.randn(length - start, 2, 16) * 8
    params = AttnParams(1.0, window)
    whole = prefill(backend, q_THD, start, stored(k_KSD, v_KSD), params)
    for row in range(0, length - start, 3):
        position = start + row
        changed = torch.full_like(v_KSD, 1e4)
        changed[:, position - window + 1 : position + 1] = v_KSD[:, position - window + 1 : position + 1]
        other = prefill(backend, q_THD, start, stored(k_KSD, changed), params)
        assert torch.equal(other.out[row], whole.out[row])


@pytest.mark.parametrize("window", [None, 20, 49])
def test_tiles_without_a_visible_key(backend, window):
    """flashinfer-ai/flashinfer#4401, pytorch/executorch#10466: fully masked tiles and rows made NaN.

    Tiles of 16 keys: with a window of 20 the first three are masked for the last rows, and each later one for some row.
    """
    sequence = random_sequence(80, 1, 16)
    params = AttnParams(0.25, window)
    q_THD = torch.randn(64, 4, 16)
    spans = [Span(sequence.view, s, 16) for s in range(0, 80, 16)]
    state = attend(q_THD, 16, spans, params, backend)
    assert_close(state, oracle(q_THD, range(16, 80), sequence, params))
    if window == 20:
        first = backend.span_state(q_THD[-16:], 64, spans[0], params)
        assert not first.out.any() and first.lse.isneginf().all()


def test_an_empty_span_and_a_span_in_the_future_are_the_identity(backend):
    sequence = random_sequence(80, 1, 16)
    q_THD = torch.randn(5, 4, 16)
    for span in (Span(sequence.view, 16, 0), Span(sequence.view, 40, 20)):
        state = backend.span_state(q_THD, 20, span, AttnParams(0.25))
        assert not state.out.any() and state.lse.isneginf().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e4])
@pytest.mark.parametrize("where", ["k", "v", "both"])
def test_unwritten_rows_are_never_read(backend, where, bad):
    """Dao-AILab/flash-attention#1745, #2374; vllm-project/vllm#936, #53856: 0 times NaN from the last block's tail.

    Also reused blocks: what a finished request left there is as unwritten as anything else.
    """
    poison = {"poison_k": bad if where != "v" else 0.0, "poison_v": bad if where != "k" else 0.0}
    for length in (1, 15, 17, 300):
        k_KSD, v_KSD = torch.randn(1, length, 16), torch.randn(1, length, 16)
        q_THD = torch.randn(length, 4, 16)
        for params in (AttnParams(0.25), AttnParams(0.25, 9), AttnParams(0.25, None, 3.0)):
            clean = stored(k_KSD, v_KSD, poison_k=0.0, poison_v=0.0)
            dirty = stored(k_KSD, v_KSD, **poison)
            expected = prefill(backend, q_THD, 0, clean, params)
            assert expected.out.isfinite().all()
            assert_same_bits(prefill(backend, q_THD, 0, dirty, params), expected)
            rows = [0, length // 2, length - 1]
            assert_same_bits(
                decode(backend, q_THD[rows], rows, dirty, params), decode(backend, q_THD[rows], rows, clean, params)
            )


def test_keys_after_the_written_end_are_never_read(backend):
    """The chunk ends inside a block whose later rows belong to nobody yet; decode stands on an earlier position."""
    sequence = random_sequence(100, 1, 16)
    q_THD = torch.randn(40, 4, 16)
    before = prefill(backend, q_THD, 10, sequence, AttnParams(0.25))
    decoded = decode(backend, q_THD[-1:], [49], sequence, AttnParams(0.25))
    for position in range(50, 100):
        slot, row = sequence.view.table[position // 16], position % 16
        sequence.view.layer.k[slot, :, row] = math.nan
        sequence.view.layer.v[slot, :, row] = math.nan
    assert_same_bits(prefill(backend, q_THD, 10, sequence, AttnParams(0.25)), before)
    assert_same_bits(decode(backend, q_THD[-1:], [49], sequence, AttnParams(0.25)), decoded)


def test_split_anywhere_and_merged_equals_unsplit(backend):
    """vllm-project/vllm#52796, flashinfer-ai/flashinfer#2113: scores up to +-80 at 4K keys, empty parts included."""
    length = 4096
    k_KSD, v_KSD = torch.randn(1, length, 16), torch.randn(1, length, 16)
    q_THD = torch.randn(2, 3, 16)
    scores = torch.einsum("thd,sd->ths", q_THD, k_KSD[0])
    params = AttnParams(80.0 / scores.abs().max().item())
    sequence = stored(k_KSD, v_KSD)
    expected = oracle(q_THD, [length - 2, length - 1], sequence, params)
    rng = np.random.default_rng(0)
    for _ in range(10):
        cuts = np.unique([0, 2048, length, *rng.integers(0, length, 5)])
        parts = [Span(sequence.view, int(a), int(b - a)) for a, b in pairwise(cuts)]
        parts.insert(int(rng.integers(0, len(parts))), Span(sequence.view, 100, 0))
        rng.shuffle(parts)
        assert_close(attend(q_THD, length - 2, parts, params, backend), expected)


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_huge_scores(backend, size):
    sequence = random_sequence(600, 1, 16)
    q_THD = torch.randn(5, 3, 16) * size
    params = AttnParams(1.0)
    positions = [0, 1, 300, 598, 599]
    expected = oracle(q_THD, positions, sequence, params)
    state = decode(backend, q_THD, positions, sequence, params)
    top_score = (q_THD.norm(dim=-1) * sequence.k.norm(dim=-1).max()).max().item()
    assert state.out.isfinite().all()
    # A score of 1e5 in fp32 is known to 1e-2 only: near ties may shift by as much, but no more.
    assert_close(AttnState(state.out, state.lse), expected, max(1e-4, 4e-7 * top_score))


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_half_precision_pools(backend, fmt):
    sequence = random_sequence(300, 3, 16, fmt=fmt)
    kept = {"bf16": torch.bfloat16, "fp16": torch.float16}[fmt]
    k_KSD, v_KSD = sequence.k.to(kept).float(), sequence.v.to(kept).float()
    q_THD = torch.randn(300, 9, 16)
    expected = naive_state(q_THD, torch.arange(300), k_KSD, v_KSD, 0, AttnParams(0.25))
    assert_close(prefill(backend, q_THD, 0, sequence, AttnParams(0.25)), expected)
    rows = [0, 150, 299]
    decoded = decode(backend, q_THD[rows], rows, sequence, AttnParams(0.25))
    assert_close(decoded, AttnState(expected.out[rows], expected.lse[rows]))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_values_of_another_size_than_keys(backend, softcap):
    sequence = random_sequence(600, 2, 24, 16)
    params = AttnParams(0.2, 77, softcap)
    q_THD = torch.randn(600, 6, 24)
    whole = prefill(backend, q_THD, 0, sequence, params)
    assert_close(whole, oracle(q_THD, range(600), sequence, params))
    rows = [0, 76, 77, 599]
    assert_close(decode(backend, q_THD[rows], rows, sequence, params), AttnState(whole.out[rows], whole.lse[rows]))
    assert_same_bits(
        prefill(backend, q_THD[301:555], 301, sequence, params), AttnState(whole.out[301:555], whole.lse[301:555])
    )


def test_strided_queries(backend):
    """Queries arrive as views of a projection's output, never as contiguous [T, H, D]."""
    sequence = random_sequence(100, 3, 16)
    q_HTD = torch.randn(9, 100, 16)
    expected = oracle(q_HTD.transpose(0, 1), range(100), sequence, AttnParams(0.25))
    assert_close(prefill(backend, q_HTD.transpose(0, 1), 0, sequence, AttnParams(0.25)), expected)
    rows = [3, 99]
    decoded = decode(backend, q_HTD[:, rows].transpose(0, 1), rows, sequence, AttnParams(0.25))
    assert_close(decoded, AttnState(expected.out[rows], expected.lse[rows]))
