"""The promises of `Backend` over every stored format: attention is exact over what was stored, whatever that is."""

# Shape legend: T query tokens, S stored tokens, K kv heads, G query heads per kv head, D head dim.
from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from longctx.attention.naive import naive_state
from longctx.attention.numba_backend import NumbaBackend
from longctx.attention.registry import BACKENDS
from longctx.attention.span import AttnParams, DecodeBatch
from longctx.attention.state import AttnState
from longctx.quant.formats import FORMATS
from tests.helpers.attention import Sequence, assert_close, assert_same_bits, decode, prefill, stored

LENGTH = 700

# (k format, v format, G, K, Dk, Dv): each format once, every group size, and head dims in and out of whole vectors.
# Each line is a kernel that a machine compiles once.
SHAPES = [
    ("bf16", "bf16", 3, 3, 64, 64),
    ("fp16", "fp16", 4, 1, 40, 40),
    ("fp8_e4m3", "fp8_e4m3", 1, 3, 96, 96),
    ("fp8_e5m2", "fp8_e5m2", 8, 1, 128, 128),
    ("int8", "int8", 4, 1, 256, 256),
    ("int4", "int4", 3, 3, 80, 80),
    ("int4", "int8", 8, 1, 128, 64),
    ("fp8_e4m3", "int4", 4, 2, 24, 136),
]
RULES = [AttnParams(0.0), AttnParams(0.0, 33, 5.0), AttnParams(0.0, 300, sinks=5)]


@pytest.fixture(params=["torch", "numba"])
def backend(request):
    return BACKENDS[request.param]()


def sequence_of(shape) -> Sequence:
    k_format, v_format, _, num_kv_heads, k_dim, v_dim = shape
    k_KSD, v_KSD = torch.randn(num_kv_heads, LENGTH, k_dim), torch.randn(num_kv_heads, LENGTH, v_dim)
    # Vectors of all sizes, nothing, and outliers among the small: each has its own scale.
    k_KSD[:, ::7] *= 0.01
    v_KSD[:, ::5] *= 30.0
    k_KSD[:, 10], v_KSD[:, 11] = 0.0, 0.0
    k_KSD[:, 20, 1], v_KSD[:, 21, 1] = 8.0, 100.0
    return stored(k_KSD, v_KSD, block_tokens=48, fmt=k_format, v_fmt=v_format)


def read_back(sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """What was stored, by the reference arithmetic alone."""
    layer, positions = sequence.view.layer, np.arange(LENGTH)
    slots, rows = torch.as_tensor(sequence.view.table[positions // 48]), torch.as_tensor(positions % 48)
    found = []
    for fmt, data, scale, dim in (
        (layer.k_format, layer.k, layer.k_scale, layer.k_dim),
        (layer.v_format, layer.v, layer.v_scale, layer.v_dim),
    ):
        data, scale = (None if x is None else x[slots, :, rows].transpose(0, 1) for x in (data, scale))
        out = torch.empty(*data.shape[:2], dim)
        fmt.codec.decode(data, scale, out)
        found.append(out)
    return found[0], found[1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_exact_over_what_is_stored(backend, shape):
    """Ragged positions, windows, soft-cap, sinks; rows nobody wrote hold NaN, or codes under a scale of NaN."""
    torch.manual_seed(0)
    sequence = sequence_of(shape)
    k_KSD, v_KSD = read_back(sequence)
    num_heads, k_dim = shape[2] * shape[3], shape[4]
    positions = [0, 1, 47, 48, 255, 256, 300, LENGTH - 1]
    q_RHD = torch.randn(len(positions), num_heads, k_dim) * 2
    # Sums in fp32 are known to a few parts in 10^7 of their largest terms.
    tolerance = 1e-5 * max(1.0, v_KSD.abs().max().item() / 10)
    for rule in RULES:
        params = AttnParams(k_dim**-0.5, rule.window, rule.softcap, rule.sinks)
        expected = naive_state(q_RHD, torch.tensor(positions), k_KSD, v_KSD, 0, params)
        together = decode(backend, q_RHD, positions, sequence, params)
        assert_close(together, expected, tolerance)
        chunk = prefill(backend, q_RHD[4:6], 255, sequence, params)
        assert_close(chunk, AttnState(expected.out[4:6], expected.lse[4:6]), tolerance)
        for row, position in enumerate(positions):
            batch = DecodeBatch(np.pad(sequence.view.table, (0, 3))[None], np.array([position]))
            alone = backend.decode_state(q_RHD[row : row + 1], sequence.view.layer, batch, params)
            assert_same_bits(alone, AttnState(together.out[row : row + 1], together.lse[row : row + 1]))


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] in ("int8", "int4")], ids=str)
def test_decode_of_formats_does_not_depend_on_threads(shape):
    sequence, backend, before = sequence_of(shape), NumbaBackend(), torch.get_num_threads()
    q_RHD, params = torch.randn(2, shape[2] * shape[3], shape[4]), AttnParams(0.1)
    states = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            states.append(decode(backend, q_RHD, [LENGTH - 1, 300], sequence, params))
    finally:
        torch.set_num_threads(before)
    for state in states[1:]:
        assert_same_bits(state, states[0])


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("shape", [SHAPES[4], SHAPES[5]], ids=str)
def test_a_vector_that_is_no_number_spoils_those_who_see_it_and_nobody_else(backend, shape, side):
    """Nothing wraps or saturates unnoticed: a request that wrote NaN reads NaN, and its batch mates do not."""
    sequence = sequence_of(shape)
    num_heads, k_dim = shape[2] * shape[3], shape[4]
    q_RHD, params = torch.randn(3, num_heads, k_dim), AttnParams(k_dim**-0.5, 100)
    positions = [350, 420, 699]
    clean = decode(backend, q_RHD, positions, sequence, params)
    scale = sequence.view.layer.k_scale if side == "k" else sequence.view.layer.v_scale
    assert scale is not None
    scale[int(sequence.view.table[400 // 48]), :, 400 % 48] = math.nan
    dirty = decode(backend, q_RHD, positions, sequence, params)
    assert dirty.out[1].isnan().all()
    for row in (0, 2):
        assert torch.equal(dirty.out[row], clean.out[row]) and torch.equal(dirty.lse[row], clean.lse[row])


def test_every_format_is_held_to_this():
    assert {s[0] for s in SHAPES} | {s[1] for s in SHAPES} | {"fp32"} == set(FORMATS)
