"""A chunk over a long history takes memory for one tile and its states, however long the history is."""

# Shape legend: T query tokens, H query heads, D head dim.
from __future__ import annotations

import pytest
import torch

from longctx.attention.attend import attend
from longctx.attention.span import TILE_TOKENS, AttnParams, Span, prefill_spans
from longctx.attention.torch_backend import TorchBackend
from longctx.quant.store import gather_tokens
from tests.helpers.attention import Sequence, random_sequence
from tests.helpers.live_bytes import LiveBytes

HISTORY, CHUNK, HEADS, KV_HEADS, DIM = 32 * 1024, 256, 4, 4, 64

TILE_BYTES = TILE_TOKENS * KV_HEADS * 2 * DIM * 4
STATE_BYTES = CHUNK * HEADS * (DIM + 1) * 4
MASK_BYTES = 1 << 20
SCORE_BYTES = CHUNK * TILE_TOKENS * HEADS * 4
"""Where the fused kernel cannot be used, one tile's scores are held too."""


class Hoarder(TorchBackend):
    """The mutant: it gathers the whole history where a tile is asked for."""

    def _gather(self, span: Span, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        k_KSD, v_KSD = gather_tokens(span.view.layer, span.view.table, 0, span.start + span.length)
        assert k_KSD.shape[1] == v_KSD.shape[1] == span.start + span.length
        return super()._gather(span, lo, hi)


@pytest.fixture(scope="module")
def history() -> Sequence:
    return random_sequence(HISTORY + CHUNK, KV_HEADS, DIM, block_tokens=256)


def peak_of(backend: TorchBackend, sequence: Sequence, params: AttnParams) -> int:
    q_THD = torch.randn(CHUNK, HEADS, DIM)
    with LiveBytes() as live:
        spans = prefill_spans(sequence.view, HISTORY, CHUNK, params)
        attend(q_THD, HISTORY, spans, params, backend)
    return live.peak


@pytest.mark.parametrize(
    ("params", "scores"),
    [(AttnParams(0.125), 0), (AttnParams(0.125, window=4096), 0), (AttnParams(0.125, softcap=30.0), SCORE_BYTES)],
    ids=["full", "window", "soft-cap"],
)
def test_one_tile_and_its_states_at_most(history: Sequence, params: AttnParams, scores: int) -> None:
    """The tile is the gathered K and V; the states are the running one, the tile's, and what merging them takes."""
    peak = peak_of(TorchBackend(), history, params)
    assert TILE_BYTES <= peak <= TILE_BYTES + 5 * STATE_BYTES + MASK_BYTES + scores


def test_the_meter_sees_a_gathered_history(history: Sequence) -> None:
    peak = peak_of(Hoarder(), history, AttnParams(0.125))
    assert peak >= 2 * HISTORY * KV_HEADS * DIM * 4


def test_the_meter_forgets_what_was_freed() -> None:
    with LiveBytes() as live:
        for _ in range(10):
            x = torch.ones(1000)
            x.add_(1).view(10, 100)
            del x
    assert 4000 <= live.peak <= 8000
