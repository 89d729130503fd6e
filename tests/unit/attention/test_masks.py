"""Every mask that a query block can meet, against its definition."""

from __future__ import annotations

import math

import pytest
import torch

from longctx.attention.masks import Q_BLOCK, MaskTables
from longctx.attention.span import TILE_TOKENS


@pytest.mark.parametrize("window", [None, 1, 2, 255, 256, 257, 512, 2048, 2100, 3000, 10**9])
def test_masks_are_what_positions_say(window):
    tables = MaskTables()
    seen_none = False
    for qb in range(0, 3 * TILE_TOKENS, Q_BLOCK):
        for tile in range(0, qb + 1, TILE_TOKENS):
            lo = tile if window is None else max(tile, (qb - window + 1) // Q_BLOCK * Q_BLOCK)
            hi = min(tile + TILE_TOKENS, qb + Q_BLOCK)
            if lo >= hi:
                continue
            for limit in (hi - lo, hi - lo - 3):
                row, key = torch.arange(qb, qb + Q_BLOCK)[:, None], torch.arange(lo, hi)
                hidden = (key > row) | (key >= lo + limit)
                if window is not None:
                    hidden |= row - key >= window
                mask = tables.get(qb - lo, hi - lo, window, limit, torch.device("cpu"))
                seen_none |= mask is None
                assert (mask is None) == (not hidden.any())
                if mask is not None:
                    assert torch.equal(mask, torch.zeros(hidden.shape).masked_fill(hidden, -math.inf))
    assert seen_none == (window is None or window >= TILE_TOKENS + Q_BLOCK)
    assert sum(t.nbytes for t in tables._tables.values()) < 10e6
