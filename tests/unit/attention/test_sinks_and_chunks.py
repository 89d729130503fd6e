"""Sinks beside a window, and chunked-local attention: every backend against the oracle, edges, and a row's bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longctx.attention.attend import attend
from longctx.attention.naive import naive_state
from longctx.attention.registry import BACKENDS
from longctx.attention.span import TILE_TOKENS, AttnParams, KVView, prefill_spans, rows_that_see
from longctx.attention.state import AttnState
from tests.helpers.attention import assert_close, assert_same_bits, decode, prefill, random_sequence, stored

# Sinks of one key, of a block's part, of several blocks; windows below and above a tile; chunks that divide nothing.
VARIANTS = [
    AttnParams(0.25, window=100, sinks=4),
    AttnParams(0.25, window=512, sinks=77, softcap=5.0),
    AttnParams(0.25, window=2100, sinks=4),
    AttnParams(0.25, window=2200, sinks=2080),
    AttnParams(0.25, local_chunk=100),
    AttnParams(0.25, local_chunk=512, softcap=5.0),
    AttnParams(0.25, local_chunk=2500),
]
LENGTH = 2600


@pytest.fixture(params=["torch", "numba"])
def backend(request):
    return BACKENDS[request.param]()


def sees(query: int, key: int, params: AttnParams) -> bool:
    """The definition once more, in words of its own."""
    if key > query:
        return False
    if params.local_chunk is not None:
        return key // params.local_chunk == query // params.local_chunk
    return params.window is None or key < params.sinks or key > query - params.window


@pytest.mark.parametrize("params", VARIANTS, ids=str)
def test_prefill_chunks_and_decode_are_the_oracles(backend, params):
    sequence = random_sequence(LENGTH, 3, 16)
    q_THD = torch.randn(LENGTH, 9, 16) * 2
    edges = {0, 1, 3, 4, 5, 19, 20, 24, 76, 77, 99, 100, 103, 104, 1499, 1500, 2047, 2048, 2079, 2080, 2499, 2500, 2599}
    rows = sorted(edges)
    expected = naive_state(q_THD[rows], torch.tensor(rows), sequence.k, sequence.v, 0, params)
    whole = prefill(backend, q_THD, 0, sequence, params)
    assert_close(AttnState(whole.out[rows], whole.lse[rows]), expected)
    assert_close(decode(backend, q_THD[rows], rows, sequence, params), expected)


@pytest.mark.parametrize("params", VARIANTS, ids=str)
def test_a_rows_bits_do_not_depend_on_its_chunk(backend, params):
    """Chunks that divide neither the window, nor the sinks, nor the local chunk; and the same rows decoded by torch."""
    sequence = random_sequence(LENGTH, 3, 16, block_tokens=48)
    q_THD = torch.randn(LENGTH, 9, 16) * 2
    whole = prefill(backend, q_THD, 0, sequence, params)
    for chunk, begin, end in ((1, 0, 6), (3, 2041, 2053), (37, 2470, 2581), (701, 0, LENGTH)):
        for start in range(begin, end, chunk):
            stop = min(start + chunk, end)
            part = prefill(backend, q_THD[start:stop], start, sequence, params)
            assert_same_bits(part, AttnState(whole.out[start:stop], whole.lse[start:stop]))
    if backend.name == "torch":
        rows = [0, 3, 4, 104, 2050]
        decoded = decode(backend, q_THD[rows], rows, sequence, params)
        assert_same_bits(decoded, AttnState(whole.out[rows], whole.lse[rows]))


@pytest.mark.parametrize("kind", ["prefill", "chunk of 7", "decode"])
@pytest.mark.parametrize("params", [AttnParams(0.25, window=40, sinks=3), AttnParams(0.25, local_chunk=60)], ids=str)
def test_planted_keys_at_every_edge(backend, kind, params):
    """B29: one key too many or too few (huggingface/transformers#39408, vllm-project/vllm#3385), sinks included.

    A planted key takes all attention of every row that sees it: its rows are exactly those of the definition.
    """
    length = 180
    q_THD = torch.ones(length, 4, 16)
    for planted in (2, 3, 60, 119):
        k_KSD, v_KSD = torch.randn(1, length, 16) * 0.1, torch.randn(1, length, 16)
        k_KSD[0, planted, 0] = 1000.0
        v_KSD[0, planted] = 77.0
        sequence = stored(k_KSD, v_KSD)
        if kind == "decode":
            state = decode(backend, q_THD, list(range(length)), sequence, params)
        else:
            step = length if kind == "prefill" else 7
            parts = [prefill(backend, q_THD[s : s + step], s, sequence, params) for s in range(0, length, step)]
            state = AttnState(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))
        is_marker = (state.out - 77.0).abs().amax((1, 2)) < 1e-3
        assert is_marker.tolist() == [sees(i, planted, params) for i in range(length)]


@pytest.mark.parametrize("params", [AttnParams(1.0, window=50, sinks=5), AttnParams(1.0, local_chunk=70)], ids=str)
def test_each_row_of_a_chunk_has_its_own_keys(backend, params):
    """B33: one bound for the whole chunk (pytorch/executorch#21857). What a row does not see may hold anything."""
    start, length = 120, 210
    k_KSD, v_KSD = torch.randn(1, length, 16), torch.randn(1, length, 16)
    q_THD = torch.randn(length - start, 2, 16) * 8
    whole = prefill(backend, q_THD, start, stored(k_KSD, v_KSD), params)
    for row in range(0, length - start, 3):
        unseen = torch.tensor([not sees(start + row, j, params) for j in range(length)])
        changed = torch.where(unseen[:, None], 1e4, v_KSD)
        other = prefill(backend, q_THD, start, stored(k_KSD, changed), params)
        assert torch.equal(other.out[row], whole.out[row])


SPANNED = [*VARIANTS, AttnParams(0.25), AttnParams(0.25, window=33), AttnParams(0.25, local_chunk=1)]


@pytest.mark.parametrize("params", SPANNED, ids=str)
def test_spans_hold_every_key_once_and_nothing_that_slid_out(params):
    """What was let go of is never read: every span lies among the sinks, or in what the first row still sees."""
    view = KVView(random_sequence(16, 1, 16).view.layer, np.ones(1, np.int64))
    for start, n in ((0, 1), (0, 2600), (3, 1), (500, 2000), (2047, 2), (2599, 1)):
        spans = list(prefill_spans(view, start, n, params))
        covered = [p for span in spans for p in range(span.start, span.start + span.length)]
        assert covered == sorted(set(covered))
        for query in {start, start + n // 2, start + n - 1}:
            seen = [j for j in range(query + 1) if sees(query, j, params)]
            assert set(seen) <= set(covered)
            for span in spans:
                first, last = rows_that_see(span, start, start + n, params)
                some = any(span.start <= j < span.start + span.length for j in seen)
                assert some == (first <= query < last)


def test_the_sinks_span_ends_with_the_sinks():
    """A far row reads the sinks and its window, not the tile that the sinks stand in."""
    view = KVView(random_sequence(16, 1, 16).view.layer, np.ones(1, np.int64))
    spans = list(prefill_spans(view, 5 * TILE_TOKENS, 1, AttnParams(0.25, window=100, sinks=4)))
    assert [(s.start, s.length) for s in spans] == [(0, 4), (4 * TILE_TOKENS, TILE_TOKENS), (5 * TILE_TOKENS, 1)]


@pytest.mark.parametrize("params", [AttnParams(0.25, window=40, sinks=20), AttnParams(0.25, local_chunk=60)], ids=str)
def test_spans_in_any_order_merge_to_the_same_attention(backend, params):
    sequence = random_sequence(300, 1, 16)
    q_THD = torch.randn(100, 3, 16)
    spans = list(prefill_spans(sequence.view, 200, 100, params, tile=64))
    expected = naive_state(q_THD, torch.arange(200, 300), sequence.k, sequence.v, 0, params)
    assert_close(attend(q_THD, 200, spans, params, backend), expected)
    assert_close(attend(q_THD, 200, spans[::-1], params, backend), expected)
