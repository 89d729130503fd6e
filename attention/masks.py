"""Additive masks of a query block: a few small tables, of which every mask in use is a slice."""

# Shape legend: Q_BLOCK query rows, S keys of one tile.
from __future__ import annotations

import math

import torch

from longctx.attention.span import TILE_TOKENS

Q_BLOCK = 64
"""Queries are cut at multiples of this position, and so are the first and last key that such a block is given. Larger
blocks make faster products and give each row more keys that it does not see: 64 was the best of 64 to 512 for a window
of 512 and behind a history of 8K; without a history, 256 gave full attention some 7 % more."""


class MaskTables:
    """Masks by relative position, made on first use; at most three tables of about 1 MB per window."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, int | None, torch.device], torch.Tensor] = {}

    def get(
        self, ahead: int, num_keys: int, window: int | None, limit: int, device: torch.device
    ) -> torch.Tensor | None:
        """Mask [Q_BLOCK, S] of a query block whose first row stands `ahead` positions after the first of S keys.

        0 where row i sees key j (0 <= i + ahead - j < window, and j < limit), -inf elsewhere; None where every row
        sees every key. At most one tile of keys, of which the first is at most Q_BLOCK - 1 older than row 0's window.
        """
        causal = num_keys > ahead + 1
        edge = window is not None and ahead + Q_BLOCK > window
        if causal:
            table, table_first = self._table("both" if edge else "causal", window if edge else None, device)
            mask = table[:, -ahead - table_first :][:, :num_keys]
        elif edge:
            assert window is not None
            table, table_first = self._table("edge", None, device)
            mask = table[:, window - ahead - table_first :][:, :num_keys]
        elif limit < num_keys:
            mask = torch.zeros(Q_BLOCK, num_keys, dtype=torch.float32, device=device)
        else:
            return None
        assert mask.shape[1] == num_keys
        if limit < num_keys:
            mask = mask.clone()
            mask[:, max(0, limit) :] = -math.inf
        return mask

    def _table(self, kind: str, window: int | None, device: torch.device) -> tuple[torch.Tensor, int]:
        """A table and the relative position of its first column: to the block's start, or to its window's start."""
        if kind == "causal":
            first, end = -TILE_TOKENS - Q_BLOCK, Q_BLOCK
        elif kind == "both":
            assert window is not None
            first, end = -(window + Q_BLOCK), Q_BLOCK
        else:
            first, end = -Q_BLOCK, Q_BLOCK + TILE_TOKENS
        key = (kind, window, device)
        if key not in self._tables:
            row = torch.arange(Q_BLOCK, device=device)[:, None]
            column = torch.arange(first, end, device=device)
            if kind == "edge":
                hidden = column <= row
            else:
                hidden = column > row
                if window is not None:
                    hidden |= row - column >= window
            zeros = torch.zeros(Q_BLOCK, end - first, dtype=torch.float32, device=device)
            self._tables[key] = zeros.masked_fill_(hidden, -math.inf)
        return self._tables[key], first
