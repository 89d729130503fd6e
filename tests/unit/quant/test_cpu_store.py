"""The compiled codecs of a CPU store and read the same bytes as the reference arithmetic, for every kind of vector."""

# Shape legend: K kv heads, T tokens, D head dim.
from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from longctx.quant.codes_numba import CODED
from longctx.quant.formats import FORMATS
from longctx.quant.layout import BlockLayout, LayerKV
from longctx.quant.store import gather_tokens, store_tokens

BLOCK, TOKENS = 16, 330


def vectors(dim: int) -> torch.Tensor:
    """[2, TOKENS, D]: random ones of every size, exact ties, both zeros, what is subnormal, huge or no number."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(2, TOKENS, dim, generator=generator)
    x[0, 0], x[0, 1], x[0, 2, ::2] = 0.0, -0.0, 0.0
    for row, bad in enumerate((math.nan, math.inf, -math.inf), 3):
        x[0, row, 3] = bad
    x[0, 6, :2] = torch.tensor([3e38, -3e38])
    x[0, 7], x[0, 8], x[0, 9] = 7.0, -7.0, torch.arange(dim) / 2
    x[0, 10] = torch.arange(dim) * 1e-40
    x[0, 11] = torch.randint(-127, 128, (dim,), generator=generator) / 2
    x[0, 11, 0] = 63.5
    x[0, 12, 0] = 1e30
    x[0, 20:130] *= torch.logspace(-45, 38, 110)[:, None]
    x[1, :110] = torch.exp2(torch.randint(-30, 10, (110, dim), generator=generator))
    x[1, 110:220] = x[1, 110:220].abs()
    x[1, 220:] = -x[1, 220:].abs()
    return x


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def stored(fmt: str, k_dim: int, v_dim: int) -> tuple[LayerKV, np.ndarray, torch.Tensor, torch.Tensor]:
    layout = BlockLayout(2, 2, BLOCK, k_dim, v_dim, FORMATS[fmt], FORMATS[fmt])
    pool = torch.full((layout.block_bytes * 25,), 0x77, dtype=torch.uint8)
    layer = layout.layer_view(pool, 1)
    table = np.random.default_rng(0).permutation(24)[: -(-TOKENS // BLOCK)] + 1
    positions, k_KTD, v_KTD = np.arange(TOKENS), vectors(k_dim), -vectors(v_dim)
    # As strided views of [T, K, D], which is how a projection leaves them; a prompt's chunk, then tokens one by one.
    k_KTD, v_KTD = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k_KTD, v_KTD))
    for chunk in (slice(0, 300), *(slice(t, t + 1) for t in range(300, TOKENS))):
        p = positions[chunk]
        store_tokens(layer, table[p // BLOCK], p % BLOCK, k_KTD[:, chunk], v_KTD[:, chunk])
    return layer, table, k_KTD, v_KTD


@pytest.mark.parametrize("dims", [(80, 16), (256, 64)], ids=str)
@pytest.mark.parametrize("fmt", CODED)
def test_the_codecs_bits(fmt, dims):
    layer, table, k_KTD, v_KTD = stored(fmt, *dims)
    slots, rows = torch.as_tensor(table[np.arange(TOKENS) // BLOCK]), torch.as_tensor(np.arange(TOKENS) % BLOCK)
    gathered = gather_tokens(layer, table, 3, TOKENS - 5, TOKENS)
    sides = ((layer.k, layer.k_scale, k_KTD), (layer.v, layer.v_scale, v_KTD))
    for (data, scale, x), got in zip(sides, gathered, strict=True):
        codes, scales = FORMATS[fmt].codec.encode(x)
        assert torch.equal(bits(data[slots, :, rows].transpose(0, 1)), bits(codes))
        assert torch.equal(bits(scale[slots, :, rows].transpose(0, 1)), bits(scales))
        expected = torch.zeros_like(x)
        FORMATS[fmt].codec.decode(codes[:, 3:-2], scales[:, 3:-2], expected[:, :-5])
        assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("fmt", CODED)
def test_nothing_else_is_written_and_null_blocks_read_as_zeros(fmt):
    layer, table, _, _ = stored(fmt, 80, 16)
    written = {(int(table[p // BLOCK]), p % BLOCK) for p in range(TOKENS)}
    for data in (layer.k, layer.v):
        for slot in range(25):
            untouched = [row for row in range(BLOCK) if (slot, row) not in written]
            assert (bits(data[slot, :, untouched]) == 0x77).all()
    slid = table.copy()
    slid[:2] = 0
    for got, kept in zip(gather_tokens(layer, slid, 0, 100), gather_tokens(layer, table, 0, 100), strict=True):
        assert not got[:, : 2 * BLOCK].any()
        assert torch.equal(bits(got[:, 2 * BLOCK :]), bits(kept[:, 2 * BLOCK :]))


def test_bf16_vectors_are_stored_as_their_values():
    layout = BlockLayout(1, 2, BLOCK, 64, 64, FORMATS["int8"], FORMATS["int8"])
    layer = layout.layer_view(torch.zeros(layout.block_bytes * 2, dtype=torch.uint8), 0)
    x = torch.randn(2, 5, 64).to(torch.bfloat16)
    store_tokens(layer, np.ones(5, np.int64), np.arange(5), x, x)
    codes, scales = FORMATS["int8"].codec.encode(x)
    assert torch.equal(layer.k[1, :, :5], codes) and torch.equal(layer.k_scale[1, :, :5], scales)
