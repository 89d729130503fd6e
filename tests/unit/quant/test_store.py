"""Tokens written to slots come back as they were, from anywhere in a pool, and nothing else is read or written."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.quant.formats import FORMATS
from longctx.quant.layout import BlockLayout, LayerKV
from longctx.quant.store import gather_tokens, store_tokens

BLOCK = 16


def poisoned_layer(num_slots: int, fmt: str = "fp32", k_dim: int = 16, v_dim: int = 16) -> LayerKV:
    layout = BlockLayout(3, 2, BLOCK, k_dim, v_dim, FORMATS[fmt], FORMATS[fmt])
    layer = layout.layer_view(torch.zeros(layout.block_bytes * num_slots, dtype=torch.uint8), 1)
    layer.k.fill_(math.nan)
    layer.v.fill_(math.nan)
    return layer


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_range_of_any_chunks_comes_back(data):
    length = data.draw(st.integers(1, 100))
    num_blocks = -(-length // BLOCK)
    layer = poisoned_layer(9, k_dim=16, v_dim=32)
    shuffled = data.draw(st.permutations(range(1, 9)) | st.just(list(range(1, 9))))
    table = np.array(shuffled[:num_blocks], np.int64)
    k_KTD, v_KTD = torch.randn(2, length, 16), torch.randn(2, length, 32)
    start = 0
    while start < length:
        end = data.draw(st.integers(start + 1, length))
        positions = np.arange(start, end)
        store_tokens(layer, table[positions // BLOCK], positions % BLOCK, k_KTD[:, start:end], v_KTD[:, start:end])
        start = end
    begin = data.draw(st.integers(0, length))
    end = data.draw(st.integers(begin, length))
    padded = data.draw(st.integers(end - begin, end - begin + 20))
    k_KSD, v_KSD = gather_tokens(layer, table, begin, end - begin, padded)
    for got, stored in ((k_KSD, k_KTD), (v_KSD, v_KTD)):
        assert torch.equal(got[:, : end - begin], stored[:, begin:end])
        assert torch.equal(got[:, end - begin :], torch.zeros_like(got[:, end - begin :]))


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_tokens_of_many_sequences_go_to_their_own_places(num_tokens):
    """Decode steps: every token in another slot, given as strided views of [T, K, D]."""
    layer = poisoned_layer(num_tokens + 2)
    slots = np.random.default_rng(0).permutation(num_tokens) + 1
    rows = np.random.default_rng(1).integers(0, BLOCK, num_tokens)
    k_TKD, v_TKD = torch.randn(num_tokens, 2, 16), torch.randn(num_tokens, 2, 16)
    store_tokens(layer, slots, rows, k_TKD.transpose(0, 1), v_TKD.transpose(0, 1))
    for stored, written in ((layer.k, k_TKD), (layer.v, v_TKD)):
        assert int((~stored.isnan()).sum()) == written.numel()
        for t in range(num_tokens):
            assert torch.equal(stored[int(slots[t]), :, int(rows[t])], written[t])


def test_slots_may_be_tensors():
    layer = poisoned_layer(4)
    k_KTD = torch.randn(2, 3, 16)
    store_tokens(layer, torch.tensor([2, 3, 2]), torch.tensor([5, 0, 6]), k_KTD, k_KTD)
    assert torch.equal(layer.k[2, :, 5:7], k_KTD[:, [0, 2]]) and torch.equal(layer.v[3, :, 0], k_KTD[:, 1])


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_stored_in_the_pools_dtype_and_gathered_in_the_buffers(fmt):
    layer = poisoned_layer(3, fmt)
    k_KTD, v_KTD = torch.randn(2, 20, 16), torch.randn(2, 20, 16)
    table, positions = np.array([2, 1]), np.arange(20)
    store_tokens(layer, table[positions // BLOCK], positions % BLOCK, k_KTD, v_KTD)
    k_KSD, _ = gather_tokens(layer, table, 0, 20)
    assert k_KSD.dtype == torch.float32
    assert torch.equal(k_KSD, k_KTD.to(FORMATS[fmt].torch_dtype).float())
    out = (torch.empty(2, 20, 16, dtype=FORMATS[fmt].torch_dtype),) * 2
    assert gather_tokens(layer, table, 0, 20, 20, out)[0] is out[0]


@pytest.mark.parametrize("count", [1, 3, 40])
def test_fp16_ends_at_its_largest_value(count):
    """B137: keys beyond 65,504 became infinite, and logits NaN (huggingface/transformers#36822, #36832, #39972)."""
    layer = poisoned_layer(6, "fp16")
    k_KTD, v_KTD = torch.randn(2, count, 16), torch.randn(2, count, 16)
    k_KTD[0, 0, :3] = torch.tensor([7e4, -1e30, math.inf])
    v_KTD[1, -1, 5] = -66_000.0
    # Every second row, so that many tokens take the indexed write.
    slots, rows = 1 + np.arange(count) * 2 // BLOCK, np.arange(count) * 2 % BLOCK
    store_tokens(layer, slots, rows, k_KTD, v_KTD)
    for stored, fresh in ((layer.k, k_KTD), (layer.v, v_KTD)):
        back = stored[torch.as_tensor(slots), :, torch.as_tensor(rows)].transpose(0, 1)
        assert torch.equal(back, fresh.clamp(-65504, 65504).half())
