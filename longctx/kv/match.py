"""The longest prefix of a request that the cache holds, in every layer group at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longctx.kv.index import BlockIndex
from longctx.kv.table import KeyChain


def first_visible(window: int | None, tokens: int, block_tokens: int) -> int:
    """The first block that the query at position `tokens`, or a later one, still sees.

    A query at i sees i-window+1 .. i (Hugging Face's convention). The blocks from here to position `tokens` are both
    what a running request must hold and what a hit at `tokens` needs.
    """
    return 0 if window is None else max(0, tokens - window + 1) // block_tokens


@dataclass(frozen=True)
class GroupMatch:
    """Slots of full blocks [first, first + len(shared)) to reference, and the slot whose first rows are copied."""

    first: int
    shared: tuple[int, ...]
    source: int


@dataclass(frozen=True)
class Match:
    """`tokens` = `full_blocks` whole blocks, shared by reference, plus `partial` rows to copy.

    Holds no references: it is valid until the cache next changes, and `KVCache.admit` checks that it still is.
    """

    tokens: int
    full_blocks: int
    partial: int
    groups: tuple[GroupMatch, ...]


@dataclass(frozen=True)
class Matcher:
    """Finds hits in the indexes of all groups; `windows` has None for full attention."""

    indexes: Sequence[BlockIndex]
    windows: Sequence[int | None]
    block_tokens: int

    def find(self, chain: KeyChain, limit: int) -> Match:
        """The largest usable hit of at most `limit` tokens.

        A hit at p needs blocks [0, p) in every full group and those that cover [p-window+1, p) in every window group.
        Candidates go down from the end of the full groups' leading run; where a window block is missing, every border
        that needs it is out, so the next candidate is that block itself.
        """
        limit = max(0, min(limit, chain.num_tokens))
        i = self._full_run(chain, limit)
        while True:
            rows, sources = self._rows(chain, i, limit)
            missing = self._missing_window_block(chain, i, i * self.block_tokens + rows)
            if missing is None:
                return self._result(chain, i, rows, sources)
            i = missing

    def _full_run(self, chain: KeyChain, limit: int) -> int:
        most = limit // self.block_tokens
        for index in self._of_kind(window=False):
            most = next((i for i in range(most) if index.find(chain.key(i)) is None), most)
        return most

    def _of_kind(self, window: bool) -> Iterator[BlockIndex]:
        return (x for x, w in zip(self.indexes, self.windows, strict=True) if (w is not None) == window)

    def _rows(self, chain: KeyChain, i: int, limit: int) -> tuple[int, list[int]]:
        """Rows of block `i` that every group can give, and the slot of each group that gives them."""
        tokens = chain.tokens(i)[: limit - i * self.block_tokens]
        rows, sources = len(tokens), []
        for index, window in zip(self.indexes, self.windows, strict=True):
            if rows == 0:
                break
            slot = 0
            if window != 1:
                slot, found = index.find_rows(chain.parent(i), tokens)
                rows = min(rows, found)
            sources.append(slot)
        # A whole block is shared, never copied: it only gets here where its next border lacks a window block.
        rows = min(rows, self.block_tokens - 1)
        return (rows, sources) if rows else (0, [0] * len(self.indexes))

    def _missing_window_block(self, chain: KeyChain, i: int, tokens: int) -> int | None:
        """The last block before `i` that a window group needs for a hit at `tokens` and does not have."""
        worst = None
        for index, window in zip(self.indexes, self.windows, strict=True):
            if window is None:
                continue
            first = first_visible(window, tokens, self.block_tokens)
            lowest = first if worst is None else max(first, worst + 1)
            missing = next((j for j in range(i - 1, lowest - 1, -1) if index.find(chain.key(j)) is None), None)
            worst = worst if missing is None else missing
        return worst

    def _result(self, chain: KeyChain, i: int, rows: int, sources: list[int]) -> Match:
        tokens = i * self.block_tokens + rows
        groups = []
        for index, window, source in zip(self.indexes, self.windows, sources, strict=True):
            first = min(i, first_visible(window, tokens, self.block_tokens))
            shared = [index.find(chain.key(j)) for j in range(first, i)]
            assert None not in shared
            groups.append(GroupMatch(first, tuple(s for s in shared if s is not None), source))
        return Match(tokens, i, rows, tuple(groups))
