"""Paged keys and values for attention tests: scattered slots, poison wherever nothing was written."""

# Shape legend: T query tokens, S stored tokens, K kv heads, B block tokens, D head dim.
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from longctx.attention.attend import attend
from longctx.attention.backend import Backend
from longctx.attention.span import AttnParams, DecodeBatch, KVView, prefill_spans
from longctx.attention.state import AttnState
from longctx.quant.formats import FORMATS
from longctx.quant.layout import BlockLayout, LayerKV
from longctx.quant.store import store_tokens


@dataclass(frozen=True)
class Sequence:
    """One stored sequence: its view, and what was stored, k [K, S, Dk] and v [K, S, Dv]."""

    view: KVView
    k: torch.Tensor
    v: torch.Tensor

    def __len__(self) -> int:
        return self.k.shape[1]


def stored(
    k_KSD: torch.Tensor,
    v_KSD: torch.Tensor,
    block_tokens: int = 16,
    fmt: str = "fp32",
    poison_k: float = math.nan,
    poison_v: float = math.nan,
    v_fmt: str | None = None,
) -> Sequence:
    """A two-layer pool, on the keys' device, whose second layer holds the sequence in shuffled slots; all else is
    poison."""
    num_kv_heads, num_tokens, dim = k_KSD.shape
    num_blocks = -(-num_tokens // block_tokens)
    layout = BlockLayout(2, num_kv_heads, block_tokens, dim, v_KSD.shape[2], FORMATS[fmt], FORMATS[v_fmt or fmt])
    pool = torch.zeros(layout.block_bytes * (num_blocks + 3), dtype=torch.uint8, device=k_KSD.device)
    layer = layout.layer_view(pool, 1)
    poison(layer, poison_k, poison_v)
    table = np.random.default_rng(num_tokens).permutation(num_blocks + 2)[:num_blocks] + 1
    positions = np.arange(num_tokens)
    store_tokens(layer, table[positions // block_tokens], positions % block_tokens, k_KSD, v_KSD)
    return Sequence(KVView(layer, table), k_KSD, v_KSD)


def poison(layer: LayerKV, k: float = math.nan, v: float = math.nan) -> None:
    """Fill every stored element, or its scale where elements have codes, with a value that no result may contain."""
    for data, scale, value in ((layer.k, layer.k_scale, k), (layer.v, layer.v_scale, v)):
        if scale is None:
            data.fill_(value)
        else:
            data.view(torch.uint8).fill_(0x77)
            scale.fill_(value)


def random_sequence(
    num_tokens: int, num_kv_heads: int, dim: int, v_dim: int | None = None, device: str = "cpu", **kwargs
) -> Sequence:
    k_KSD = torch.randn(num_kv_heads, num_tokens, dim).to(device)
    return stored(k_KSD, torch.randn(num_kv_heads, num_tokens, v_dim or dim).to(device), **kwargs)


def prefill(
    backend: Backend, q_THD: torch.Tensor, start: int, sequence: Sequence, params: AttnParams, **kwargs
) -> AttnState:
    """Attention of a chunk over everything it may see."""
    spans = prefill_spans(sequence.view, start, q_THD.shape[0], params, **kwargs)
    return attend(q_THD, start, spans, params, backend)


def decode(
    backend: Backend, q_RHD: torch.Tensor, positions: list[int], sequence: Sequence, params: AttnParams
) -> AttnState:
    """One query per position, all against the same sequence."""
    tables = np.tile(sequence.view.table, (len(positions), 1))
    batch = DecodeBatch(tables, np.array(positions, np.int64))
    return backend.decode_state(q_RHD, sequence.view.layer, batch, params)


def assert_same_bits(a: AttnState, b: AttnState) -> None:
    assert torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)


def assert_close(a: AttnState, b: AttnState, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a.out.double(), b.out.double(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(a.lse.double(), b.lse.double(), atol=tolerance, rtol=tolerance)
