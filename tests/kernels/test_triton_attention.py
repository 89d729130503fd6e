"""The Triton attention kernels, interpreted, against float64 over what is stored: every format, shape and mask."""

# Shape legend: T query tokens, S keys, H query heads, K kv heads, D head dim.
from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from longctx.attention.naive import naive_state
from longctx.attention.span import AttnParams, DecodeBatch, KVView, Span
from longctx.attention.state import AttnState
from longctx.attention.triton_backend import TritonBackend
from longctx.quant.formats import FORMATS
from longctx.quant.layout import BlockLayout
from longctx.quant.store import gather_tokens, store_tokens
from tests.helpers.attention import Sequence, assert_close, assert_same_bits, decode, poison, random_sequence, stored


@pytest.fixture
def backend() -> TritonBackend:
    return TritonBackend()


def chunk_state(backend, q_THD, start, sequence, params, first=0) -> AttnState:
    """The chunk over one span from `first` to its own end, as the engine cuts it."""
    return backend.span_state(q_THD, start, Span(sequence.view, first, start + len(q_THD) - first), params)


def oracle(q_THD, positions, sequence, params) -> AttnState:
    """float64 over the keys and values as they read back."""
    k_KSD, v_KSD = gather_tokens(sequence.view.layer, sequence.view.table, 0, len(sequence))
    return naive_state(q_THD.float(), torch.as_tensor(positions), k_KSD, v_KSD, 0, params)


def rows_of(state: AttnState, rows) -> AttnState:
    return AttnState(state.out[rows], state.lse[rows])


# (query heads, kv heads), head dim, block, format, window, soft-cap, sinks, local chunk.
CASES = [
    ((1, 1), 64, 16, "fp32", None, None, 0, None),
    ((3, 1), 80, 48, "fp32", 33, None, 5, None),
    ((4, 1), 96, 16, "bf16", None, 5.0, 0, None),
    ((8, 1), 128, 64, "fp16", 100, None, 0, None),
    ((4, 1), 256, 16, "fp8_e4m3", None, None, 0, 64),
    ((3, 1), 64, 256, "fp8_e5m2", 20, 3.0, 70, None),
    ((6, 2), 80, 16, "int8", None, None, 0, None),
    ((1, 1), 128, 64, "int8", 1, None, 1, None),
    ((3, 1), 64, 64, "int4", None, None, 0, 50),
    ((4, 1), 80, 16, "int4", 64, None, 0, None),
    ((3, 1), 96, 48, "int4", None, None, 0, None),
    ((2, 2), 256, 256, "int4", 31, None, 3, None),
    ((4, 1), 96, 16, "fp8_e4m3", 64, None, 64, None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_prefill_and_decode_are_attention(backend, case):
    """GQA 1, 3, 4, 8; unwritten rows are NaN, their scales too; odd lengths (B42, B44; vllm-project/vllm#22003)."""
    (num_heads, num_kv_heads), dim, block, fmt, window, softcap, sinks, local_chunk = case
    params = AttnParams(dim**-0.5, window, softcap, sinks, local_chunk)
    sequence = random_sequence(151, num_kv_heads, dim, block_tokens=block, fmt=fmt)
    start = 101
    q_THD = torch.randn(len(sequence) - start, num_heads, dim) * 2
    expected = oracle(q_THD, range(start, len(sequence)), sequence, params)
    assert_close(chunk_state(backend, q_THD, start, sequence, params), expected)
    rows = [0, 27, 49]
    decoded = decode(backend, q_THD[rows], [start + r for r in rows], sequence, params)
    assert_close(decoded, rows_of(expected, rows))


@pytest.mark.parametrize(("dtype", "fmt"), [("bfloat16", "bf16"), ("bfloat16", "int8"), ("float16", "fp8_e5m2")])
def test_half_precision_queries(backend, dtype, fmt):
    """Products in the queries' dtype, sums in fp32: of weights and values fp16 keeps 11 bits, nothing else is rounded.

    The interpreter's products know no bf16: there it is fp32.
    Values of 1e-3 under e5m2's scale of 1e-3 / 57,344 would vanish in fp16 were weights scaled instead of values.
    """
    k_KSD, v_KSD = torch.randn(1, 90, 64), torch.randn(1, 90, 64) * 1e-3
    sequence = stored(k_KSD, v_KSD, fmt=fmt)
    q_THD = torch.randn(3, 2, 64).to(getattr(torch, dtype))
    params = AttnParams(0.125)
    expected = oracle(q_THD, range(87, 90), sequence, params)
    rounding = {"bfloat16": 2**-22, "float16": 2**-11}[dtype]
    largest = sequence.v.abs().amax().item() * 1.1
    for state in (
        chunk_state(backend, q_THD, 87, sequence, params),
        decode(backend, q_THD, [87, 88, 89], sequence, params),
    ):
        assert (state.out - expected.out).abs().max() < 2 * rounding * largest
        assert (state.lse - expected.lse).abs().max() < 1e-5


def test_keys_and_values_of_other_formats_and_sizes(backend):
    layout = BlockLayout(1, 1, 16, 80, 64, FORMATS["int8"], FORMATS["int4"])
    pool = torch.zeros(layout.block_bytes * 8, dtype=torch.uint8)
    layer = layout.layer_view(pool, 0)
    poison(layer)
    table, positions = np.array([5, 2, 7, 1, 4]), np.arange(75)
    k_KSD, v_KSD = torch.randn(1, 75, 80), torch.randn(1, 75, 64)
    store_tokens(layer, table[positions // 16], positions % 16, k_KSD, v_KSD)
    sequence = Sequence(KVView(layer, table), k_KSD, v_KSD)
    q_THD = torch.randn(75, 2, 80)
    expected = oracle(q_THD, range(75), sequence, AttnParams(0.1))
    assert_close(chunk_state(backend, q_THD, 0, sequence, AttnParams(0.1)), expected)
    assert_close(decode(backend, q_THD[[0, 74]], [0, 74], sequence, AttnParams(0.1)), rows_of(expected, [0, 74]))


@pytest.mark.parametrize(
    ("fmt", "params"),
    [
        ("int8", AttnParams(0.25)),
        ("bf16", AttnParams(0.25, 60, None, 9)),
        # A window of several tiles: some are seen by all rows of a query tile, and these are folded first.
        ("fp32", AttnParams(0.25, 150)),
        ("int4", AttnParams(0.25, None, 5.0, 0, 90)),
    ],
    ids=["full", "window and sinks", "long window", "local chunks"],
)
def test_a_rows_bits_do_not_depend_on_its_chunk(backend, fmt, params):
    sequence = random_sequence(200, 1, 32, fmt=fmt)
    q_THD = torch.randn(200, 1, 32).bfloat16() * 2
    whole = chunk_state(backend, q_THD, 0, sequence, params)
    begin = 0
    for chunk in (1, 62, 3, 64, 33, 37):
        part = chunk_state(backend, q_THD[begin : begin + chunk], begin, sequence, params)
        assert_same_bits(part, rows_of(whole, slice(begin, begin + chunk)))
        begin += chunk
    assert begin == 200


@pytest.mark.parametrize("params", [AttnParams(0.25), AttnParams(0.25, 300, None, 10)], ids=["full", "window"])
def test_decode_does_not_depend_on_batch_mates(backend, params):
    """Alone or in company, with a wider block table: the same bits, over several splits of a sequence."""
    sequence = random_sequence(600, 1, 16, fmt="int8")
    positions = [0, 255, 256, 599]
    q_RHD = torch.randn(4, 3, 16)
    together = decode(backend, q_RHD, positions, sequence, params)
    assert_close(together, oracle(q_RHD, positions, sequence, params))
    for row, position in enumerate(positions):
        batch = DecodeBatch(np.pad(sequence.view.table, (0, 7))[None], np.array([position]))
        alone = backend.decode_state(q_RHD[row : row + 1], sequence.view.layer, batch, params)
        assert_same_bits(alone, rows_of(together, [row]))


@pytest.mark.parametrize("fmt", ["fp32", "int8", "int4"])
def test_unwritten_rows_are_never_read(backend, fmt):
    """Dao-AILab/flash-attention#1745, vllm-project/vllm#936: 0 times NaN. Null blocks of a window are as unwritten."""
    k_KSD, v_KSD = torch.randn(1, 85, 64), torch.randn(1, 85, 64)
    q_THD = torch.randn(20, 1, 64)
    params = AttnParams(0.125, 24)
    states = []
    for bad in (0.0, math.nan, 1e4):
        sequence = stored(k_KSD, v_KSD, fmt=fmt, poison_k=bad, poison_v=bad)
        layer = sequence.view.layer
        table = sequence.view.table.copy()
        table[:2] = 0  # slid out: the first row of the chunk sees keys from 42 on
        view = Sequence(KVView(layer, table), k_KSD, v_KSD)
        prefilled = chunk_state(backend, q_THD, 65, view, params)
        decoded = decode(backend, q_THD[[0, 19]], [65, 84], view, params)
        states.append((prefilled, decoded))
    assert states[0][0].out.isfinite().all()
    for prefilled, decoded in states[1:]:
        assert_same_bits(prefilled, states[0][0])
        assert_same_bits(decoded, states[0][1])


def test_spans_and_rows_without_a_visible_key_are_the_identity(backend):
    """flashinfer-ai/flashinfer#4401: fully masked rows made NaN. Here some rows of a tile see keys, others do not."""
    sequence = random_sequence(80, 1, 16)
    q_THD = torch.randn(40, 1, 16)
    for span in (Span(sequence.view, 16, 0), Span(sequence.view, 70, 10)):
        state = backend.span_state(q_THD[:5], 20, span, AttnParams(0.25))
        assert not state.out.any() and state.lse.isneginf().all()
    params = AttnParams(0.25, 20)
    state = backend.span_state(q_THD, 40, Span(sequence.view, 16, 16), params)
    expected = naive_state(q_THD, torch.arange(40, 80), sequence.k[:, 16:32], sequence.v[:, 16:32], 16, params)
    assert_close(state, expected)
    assert state.lse[:, 0].isneginf().tolist() == [position - 20 + 1 > 31 for position in range(40, 80)]


def test_the_window_has_exactly_its_keys(backend):
    """huggingface/transformers#39408: one token too wide or narrow. A planted key takes all attention that sees it."""
    window, planted, length = 40, 80, 140
    k_KSD, v_KSD = torch.randn(1, length, 16) * 0.1, torch.randn(1, length, 16)
    k_KSD[0, planted, 0] = 1000.0
    v_KSD[0, planted] = 77.0
    sequence = stored(k_KSD, v_KSD)
    q_THD = torch.ones(length, 1, 16)
    params = AttnParams(0.25, window)
    state = chunk_state(backend, q_THD, 0, sequence, params)
    is_marker = (state.out - 77.0).abs().amax((1, 2)) < 1e-3
    assert is_marker.nonzero().flatten().tolist() == list(range(planted, planted + window))
    edges = [planted - 1, planted, planted + window - 1, planted + window]
    decoded = decode(backend, q_THD[edges], edges, sequence, params)
    is_marker = (decoded.out - 77.0).abs().amax((1, 2)) < 1e-3
    assert is_marker.tolist() == [False, True, True, False]


def test_huge_scores_and_strided_queries(backend):
    """Queries arrive as views of a projection's output; scores up to 1e5 neither overflow nor make NaN."""
    sequence = random_sequence(130, 2, 16)
    q_HTD = torch.randn(6, 3, 16) * 1e4
    q_THD, positions = q_HTD.transpose(0, 1), range(127, 130)
    params = AttnParams(1.0)
    expected = oracle(q_THD, positions, sequence, params)
    top_score = (q_THD.norm(dim=-1) * sequence.k.norm(dim=-1).max()).max().item()
    for state in (
        chunk_state(backend, q_THD, 127, sequence, params),
        decode(backend, q_THD, list(positions), sequence, params),
    ):
        assert_close(state, expected, 4e-7 * top_score)


@pytest.mark.parametrize("block", [16, 64])
def test_offsets_are_64_bit(backend, block):
    """vllm-project/vllm#1486: a slot's start beyond 2 ** 31 elements, in a pool of which few pages are touched."""
    sequence = random_sequence(40, 1, 16, fmt="int8", block_tokens=block)
    near = sequence.view.layer
    stride = (1 << 31) - (1 << 20)
    num_slots = len(near.k)
    bytes_NS = torch.empty(num_slots * stride, dtype=torch.int8)
    far = {
        name: bytes_NS[offset:].as_strided(x.shape, (stride, *x.stride()[1:]))
        for name, x, offset in (("k", near.k, 0), ("v", near.v, 1 << 20))
    }
    for name, view in far.items():
        view.copy_(getattr(near, name))
    layer = type(near)(**{**vars(near), **far})
    view = Sequence(KVView(layer, sequence.view.table), sequence.k, sequence.v)
    assert max(sequence.view.table) * stride > 1 << 31
    q_THD = torch.randn(3, 1, 16)
    params = AttnParams(0.25)
    assert_same_bits(chunk_state(backend, q_THD, 37, view, params), chunk_state(backend, q_THD, 37, sequence, params))
    positions = [37, 38, 39]
    assert_same_bits(
        decode(backend, q_THD, positions, view, params), decode(backend, q_THD, positions, sequence, params)
    )
