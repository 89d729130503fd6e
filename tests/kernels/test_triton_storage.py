"""Triton's storing, gathering, copying and merging beside the codecs and operators that define them, bit for bit."""

# Shape legend: T tokens, K kv heads, H query heads, B block tokens, D head dim.
from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from longctx.attention.kernels import merge_triton
from longctx.attention.state import AttnState, empty_state, merge, merge_into, use_merge_kernel
from longctx.quant import blocks_triton, store_triton
from longctx.quant.formats import FORMATS
from longctx.quant.layout import BlockLayout, LayerKV
from longctx.quant.store import gather_tokens, store_tokens, use_kernels
from tests.helpers.storage import BLOCK, assert_same_layer, hard_vectors, poisoned_layer, same_bits

DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer_pair(*shape, device: str, **options) -> tuple[LayerKV, LayerKV]:
    """Two poisoned layers: one for the codecs, one for the kernels."""
    return poisoned_layer(*shape, device, **options), poisoned_layer(*shape, device, **options)


CASES = [(fmt, fmt, dim, dim, DTYPES[(i + j) % 3]) for i, fmt in enumerate(FORMATS) for j, dim in enumerate(DIMS)] + [
    ("int8", "int4", 96, 64, torch.float32),
    ("fp8_e5m2", "fp16", 40, 24, torch.bfloat16),
]


@pytest.mark.parametrize(("k_fmt", "v_fmt", "k_dim", "v_dim", "dtype"), CASES)
def test_what_is_stored_is_what_the_codec_stores(k_fmt, v_fmt, k_dim, v_dim, dtype, device):
    """B50 too: zeros, outliers, infinity, NaN; the same comes back, and zeros for padding and the null block."""
    reference, layer = layer_pair(k_fmt, v_fmt, k_dim, v_dim, device=device)
    num_tokens = 21
    k_KTD, v_KTD = (hard_vectors(2, num_tokens, dim, dtype, device) for dim in (k_dim, v_dim))
    table, positions = np.array([4, 2, 0, 5]), np.arange(num_tokens)
    where = table[positions // BLOCK], positions % BLOCK
    store_tokens(reference, *where, k_KTD, v_KTD)
    store_triton.store_tokens(layer, *where, k_KTD, v_KTD)
    assert_same_layer(reference, layer)

    # From inside a block over a shorter last one; then over the null block, and with rows that nobody asked for.
    start, length, padded = 5, num_tokens - 5, 39
    out_dtype = DTYPES[(DTYPES.index(dtype) + 1) % 3]
    expected = gather_tokens(reference, table, start, length, padded, _outs(k_dim, v_dim, padded, out_dtype, device))
    out = _outs(k_dim, v_dim, padded, out_dtype, device)
    store_triton.gather_tokens(layer, table, start, length, out)
    assert all(same_bits(a, b) for a, b in zip(expected, out, strict=True))
    out = _outs(k_dim, v_dim, 30, out_dtype, device)
    store_triton.gather_tokens(layer, np.array([0, 4, 0]), 9, 30, out)
    assert not out[0][:, :7].any() and out[0][:, 7:23].any() and not out[0][:, 23:].any()


def _outs(k_dim: int, v_dim: int, total: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned, and not contiguous: a head's rows lie three further rows apart."""
    k_out, v_out = (
        torch.full((2, total + 3, dim), math.nan, dtype=dtype, device=device)[:, :total] for dim in (k_dim, v_dim)
    )
    return k_out, v_out


@pytest.mark.parametrize("fmt", ["bf16", "int8", "int4"])
def test_decoding_sequences_store_from_any_strides(fmt, device):
    """Every token in another slot, as a view of [T, K, D], and of a tensor whose head dim is not the innermost."""
    reference, layer = layer_pair(fmt, fmt, 64, 64, device=device, heads=3)
    x = hard_vectors(6, 40, 64, torch.float32, device)
    slots = np.array([1, 2, 3, 5, 6])
    rows = np.array([0, 15, 7, 3, 3])
    k_KTD = x[:3, :5].transpose(0, 1).contiguous().transpose(0, 1)
    v_KTD = x[3:, ::8].transpose(1, 2).contiguous().transpose(1, 2)
    assert v_KTD.stride(2) != 1 and k_KTD.stride(1) > k_KTD.stride(0)
    store_tokens(reference, slots, rows, k_KTD, v_KTD)
    store_triton.store_tokens(layer, torch.as_tensor(slots), torch.as_tensor(rows), k_KTD, v_KTD)
    assert_same_layer(reference, layer)


def test_kernels_that_are_installed_are_used(device):
    reference, layer = layer_pair("int8", "fp8_e4m3", 64, 64, device=device)
    k_KTD, v_KTD = torch.randn(2, 3, 64, device=device), torch.randn(2, 3, 64, device=device)
    where = np.array([3, 3, 3]), np.array([0, 1, 2])
    store_triton.store_tokens(reference, *where, k_KTD, v_KTD)
    calls = []
    kernels = store_triton.KERNELS
    use_kernels(device, kernels._replace(store=lambda *args: calls.append("store") or kernels.store(*args)))
    use_merge_kernel(device, lambda *args: calls.append("merge"))
    try:
        store_tokens(layer, *where, k_KTD, v_KTD)
        out = gather_tokens(layer, np.array([3]), 0, 3)
        merge_into(random_state(2, 1, 64, device), random_state(2, 1, 64, device))
    finally:
        use_kernels(device, None)
        use_merge_kernel(device, None)
    assert calls == ["store", "merge"]
    assert_same_layer(reference, layer)
    assert all(torch.equal(a, b) for a, b in zip(out, gather_tokens(layer, np.array([3]), 0, 3), strict=True))


def test_offsets_beyond_31_bits(device):
    """vllm-project/vllm#1486: the last slot of a pool of more than 2^31 elements; only pages in use are resident."""
    layout = BlockLayout(1, 1, 256, 256, 256, FORMATS["int8"], FORMATS["int8"])
    num_slots = (1 << 32) // layout.block_bytes + 3
    pool = torch.from_numpy(np.zeros(num_slots * layout.block_bytes, np.uint8)).to(device)
    layer = layout.layer_view(pool, 0)
    assert layer.k.stride(0) * (num_slots - 1) > 1 << 31
    k_KTD, v_KTD = torch.randn(1, 20, 256, device=device), torch.randn(1, 20, 256, device=device)
    table, positions = np.array([num_slots - 1]), np.arange(20) + 200
    store_triton.store_tokens(layer, table[positions // 256], positions, k_KTD, v_KTD)
    out = (torch.empty(1, 20, 256, device=device), torch.empty(1, 20, 256, device=device))
    store_triton.gather_tokens(layer, table, 200, 20, out)
    for got, expected in zip(out, gather_tokens(layer, table, 200, 20), strict=True):
        assert torch.equal(got, expected) and got.any()
    for neighbour in (0, 1, num_slots - 2):
        assert not layer.k[neighbour].any() and not layer.v[neighbour].any()

    slots = np.array([num_slots - 1, 1])
    buffer = torch.empty(2, layout.block_bytes, dtype=torch.uint8, device=device)
    blocks_triton.gather_blocks(pool, layout.block_bytes, slots, buffer)
    assert torch.equal(buffer[0], pool[-layout.block_bytes :]) and not buffer[1].any()
    blocks_triton.scatter_blocks(pool, layout.block_bytes, slots[::-1].copy(), buffer)
    assert torch.equal(pool[layout.block_bytes : 2 * layout.block_bytes], buffer[0])
    assert not pool[-layout.block_bytes :].any() and not layer.k[num_slots - 2].any()


@pytest.mark.parametrize(("begin", "end"), [(0, None), (64, 64 * 150), (64 * 200, None), (64, 64)])
def test_blocks_go_to_a_buffer_and_back(begin, end, device):
    """Odd sizes around the words of a program; what was not asked for stays as it was, on both sides."""
    block_bytes = 64 * 263
    pool = torch.randint(0, 256, (block_bytes * 6,), dtype=torch.uint8, device=device)
    slots = np.array([5, 1, 4])
    blocks = pool.view(6, -1)
    buffer = torch.full((3, (end or block_bytes) - begin), 0x77, dtype=torch.uint8, device=device)
    blocks_triton.gather_blocks(pool, block_bytes, slots, buffer, begin, end)
    assert torch.equal(buffer, blocks[torch.as_tensor(slots, device=device), begin:end])

    expected = blocks.clone()
    expected[torch.as_tensor([2, 5, 0], device=device), begin:end] = buffer
    blocks_triton.scatter_blocks(pool, block_bytes, torch.tensor([2, 5, 0]), buffer, begin, end)
    assert torch.equal(blocks, expected)


def random_state(num_tokens: int, num_heads: int, dim: int, device: str) -> AttnState:
    """A state whose scores reach 80 in size; some rows have seen nothing."""
    out, lse = torch.randn(num_tokens, num_heads, dim), torch.rand(num_tokens, num_heads) * 160 - 80
    empty = torch.rand(num_tokens, num_heads) < 0.2
    return AttnState(out.masked_fill(empty[..., None], 0.0).to(device), lse.masked_fill(empty, -math.inf).to(device))


@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (3, 80), (9, 128), (8, 24)])
def test_states_merge_as_they_do_in_torch(heads, dim, device):
    """B47 (vllm-project/vllm#22003, vllm-project/flash-attention#87): transposed log-sums were read wrong."""
    a, b = random_state(11, heads, dim, device), random_state(11, heads, dim, device)
    expected = merge(a, b)
    lse_HT = a.lse.t().contiguous()  # as some libraries return it
    out_HTD = b.out.transpose(0, 1).contiguous()
    state = AttnState(a.out.clone(), lse_HT.t())
    part = AttnState(out_HTD.transpose(0, 1), torch.stack((b.lse, b.lse), -1)[..., 1])
    merge_triton.merge_into(state, part)
    torch.testing.assert_close(state.out, expected.out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(state.lse, expected.lse, atol=1e-6, rtol=1e-6)
    assert torch.equal(part.out, b.out) and torch.equal(part.lse, b.lse)

    nothing = empty_state(11, heads, dim, device)
    kept = AttnState(b.out.clone(), b.lse.clone())
    merge_triton.merge_into(kept, nothing)
    assert torch.equal(kept.out, b.out) and torch.equal(kept.lse, b.lse)
    merge_triton.merge_into(nothing, b)
    assert torch.equal(nothing.out, b.out) and torch.equal(nothing.lse, b.lse)


def test_merging_rows_of_a_state_leaves_the_others(device):
    a, b = random_state(20, 2, 64, device), random_state(7, 2, 64, device)
    expected = AttnState(a.out.clone(), a.lse.clone())
    merge_into(AttnState(expected.out[5:12], expected.lse[5:12]), AttnState(b.out.clone(), b.lse))
    merge_triton.merge_into(AttnState(a.out[5:12], a.lse[5:12]), b)
    torch.testing.assert_close(a.out, expected.out, atol=1e-6, rtol=1e-6)
    assert torch.equal(a.out[:5], expected.out[:5]) and torch.equal(a.out[12:], expected.out[12:])


def test_states_that_the_merge_cannot_read_are_refused(device):
    a, b = random_state(4, 2, 64, device), random_state(4, 2, 64, device)
    wide = torch.stack((b.out, b.out), -1)[..., 0]
    for part in (AttnState(wide, b.lse), AttnState(b.out.double(), b.lse), AttnState(b.out, b.lse[:, :1])):
        with pytest.raises(AssertionError):
            merge_triton.merge_into(a, part)
