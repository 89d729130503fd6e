"""Floors against numbers worked out by hand, for the two models that every note is about."""

from __future__ import annotations

import pytest

from longctx.attention.reach import Reach
from longctx.evals.bench.floors import (
    Floor,
    attention_bytes,
    decode_floor,
    prefill_floor,
    visible_pairs,
)
from longctx.evals.bench.limits import Limits
from longctx.models.spec import LayerSpec, ModelSpec, RopeSpec

LIMITS = Limits(184e9, 18.9e9)
"""The machine for which the floors below were worked out."""

K = 1024


def make_spec(
    name: str, windows: list[int | None], heads: int, kv_heads: int, dim: int, hidden: int, mlp: int, vocab: int
) -> ModelSpec:
    linear = len(windows) * (2 * hidden * (heads + kv_heads) * dim + 3 * hidden * mlp)
    layers = tuple(LayerSpec(i, w, heads, kv_heads, dim, dim, dim**-0.5) for i, w in enumerate(windows))
    head = vocab * hidden
    return ModelSpec(
        *(name, name, "float32", len(layers), hidden, vocab, 32 * K, layers, RopeSpec()),
        num_params=linear + head,
        embedding_params=head,
        head_params=head,
        linear_params=linear,
        active_linear_params=linear,
        tied=True,
    )


GEMMA = make_spec("gemma3-270m", [*[512] * 5, None] * 3, 4, 1, 256, 640, 2048, 262_144)
SMOLLM = make_spec("smollm2-135m", [None] * 30, 9, 3, 64, 576, 1536, 49_152)


def rounded_like(expected: float, value: float) -> float:
    """`value` with as many digits as were worked out by hand."""
    return round(value, len(str(expected).partition(".")[2]))


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        (GEMMA, {1: 1.3, 4: 5.7, 8: 12.5, 16: 29.6, 32: 77}),
        (SMOLLM, {1: 1.4, 4: 7.9, 8: 22, 16: 69}),
    ],
    ids=["gemma", "smollm"],
)
def test_prefill_floors(spec: ModelSpec, seconds: dict[int, float]) -> None:
    for length, expected in seconds.items():
        assert rounded_like(expected, prefill_floor(spec, length * K).seconds(LIMITS)) == expected, length


@pytest.mark.parametrize(
    ("spec", "weight_bytes", "kv_scale", "rates"),
    [
        (GEMMA, 4.0, 1.0, {1: 17.3, 32: 14.7}),
        (SMOLLM, 4.0, 1.0, {1: 32, 16: 15}),
        # 8-bit weights with a 16-bit scale for every 32, and keys and values of 16 bits.
        (GEMMA, 34 / 32, 0.5, {1: 64, 32: 48}),
        (SMOLLM, 34 / 32, 0.5, {1: 114, 16: 36}),
    ],
)
def test_decode_floors(spec: ModelSpec, weight_bytes: float, kv_scale: float, rates: dict[int, float]) -> None:
    kv = {layer.index: int(layer.num_kv_heads * 2 * layer.k_dim * 4 * kv_scale) for layer in spec.layers}
    for length, expected in rates.items():
        floor = decode_floor(spec, length * K, kv, weight_bytes)
        assert rounded_like(expected, 1 / floor.seconds(LIMITS)) == expected, length


def test_the_parts_of_a_prefill_to_the_last_operation() -> None:
    spec = make_spec("tiny", [None, 3], heads=2, kv_heads=1, dim=8, hidden=16, mlp=32, vocab=100)
    linears = 2 * (2 * 16 * 3 * 8 + 3 * 16 * 32)
    pairs = (1 + 2 + 3 + 4 + 5) + (1 + 2 + 3 + 3 + 3)
    assert prefill_floor(spec, 5).flops == 2 * linears * 5 + 4 * 2 * 8 * pairs + 2 * 1600
    # The last two of them on their own: the others' keys are seen and not computed.
    assert prefill_floor(spec, 2, start=3).flops == 2 * linears * 2 + 4 * 2 * 8 * (4 + 5 + 3 + 3) + 2 * 1600


def test_a_window_layer_is_read_up_to_its_window() -> None:
    spec = make_spec("tiny", [None, 3], heads=2, kv_heads=1, dim=8, hidden=16, mlp=32, vocab=100)
    assert attention_bytes(spec, 2) == (2 + 2) * 2 * 8 * 4
    assert attention_bytes(spec, 10) == (10 + 3) * 2 * 8 * 4
    assert attention_bytes(spec, 10, {0: 7, 1: 5}) == 10 * 7 + 3 * 5


REACHES = [Reach(), Reach(1), Reach(3), Reach(8), Reach(3, 2), Reach(8, 7), Reach(local_chunk=3), Reach(local_chunk=8)]


def seen(query: int, reach: Reach) -> int:
    """Keys that a query sees, one by one."""
    first = 0 if reach.local_chunk is None else query // reach.local_chunk * reach.local_chunk
    inside = range(first, query + 1)
    return sum(reach.window is None or query - j < reach.window or j < reach.sinks for j in inside)


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize(("start", "n"), [(0, 1), (0, 5), (2, 4), (7, 3), (4, 0), (1, 30)])
def test_visible_pairs_are_counted_exactly(start: int, n: int, reach: Reach) -> None:
    assert visible_pairs(start, n, reach) == sum(seen(i, reach) for i in range(start, start + n))
    assert all(reach.keys(context) == seen(context - 1, reach) for context in range(1, 40))


def test_a_floor_is_what_takes_longer() -> None:
    assert Floor(flops=184e9).seconds(LIMITS) == 1.0
    assert Floor(flops=184e9, bytes_read=2 * 18.9e9).seconds(LIMITS) == 2.0
