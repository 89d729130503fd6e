"""The longest prefix of a request that the cache holds, in every layer group at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longctx.attention.reach import Reach
from longctx.kv.index import BlockIndex
from longctx.kv.table import KeyChain


@dataclass(frozen=True)
class GroupMatch:
    """Slots of full blocks [first, first + len(window)) to reference, and the slot whose first rows are copied.

    `sinks` are the slots of the blocks [0, len(sinks)) before `first` that never slide out.
    """

    first: int
    window: tuple[int, ...]
    source: int
    sinks: tuple[int, ...] = ()

    @property
    def shared(self) -> tuple[int, ...]:
        return self.sinks + self.window


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
    """Finds hits in the indexes of all groups."""

    indexes: Sequence[BlockIndex]
    reaches: Sequence[Reach]
    block_tokens: int

    def find(self, chain: KeyChain, limit: int) -> Match:
        """The largest usable hit of at most `limit` tokens.

        A hit at p needs blocks [0, p) in every full group; in every other one those that the query at p sees, and the
        sinks'. Candidates go down from the end of the leading run in the full groups and the sinks; where a window
        block is missing, every border that needs it is out, so the next candidate is that block itself. A hit reads
        something.
        """
        limit = max(0, min(limit, chain.num_tokens))
        i = self._leading_run(chain, limit)
        while True:
            rows, sources = self._rows(chain, i, limit)
            missing = self._missing_window_block(chain, i, i * self.block_tokens + rows)
            if missing is None and self._reads_something(i, rows):
                return self._result(chain, i, rows, sources)
            if i == 0:
                return self._result(chain, 0, 0, [0] * len(self.indexes))
            i = i - 1 if missing is None else missing

    def _leading_run(self, chain: KeyChain, limit: int) -> int:
        """Blocks before the first that is missing and that every later hit needs: of a full group or of sinks."""
        most = limit // self.block_tokens
        for index, reach in zip(self.indexes, self.reaches, strict=True):
            needed = most if reach.most is None else min(most, reach.sink_blocks(self.block_tokens))
            most = next((i for i in range(needed) if index.find(chain.key(i)) is None), most)
        return most

    def _rows(self, chain: KeyChain, i: int, limit: int) -> tuple[int, list[int]]:
        """Rows of block `i` that every group can give, and the slot of each group that gives them."""
        tokens = chain.tokens(i)[: limit - i * self.block_tokens]
        rows, sources = len(tokens), []
        for index, reach in zip(self.indexes, self.reaches, strict=True):
            if rows == 0:
                break
            slot = 0
            if reach.most != 1:
                slot, found = index.find_rows(chain.parent(i), tokens)
                rows = min(rows, found)
            sources.append(slot)
        # A whole block is shared, never copied: it only gets here where its next border lacks a window block.
        rows = min(rows, self.block_tokens - 1)
        return (rows, sources) if rows else (0, [0] * len(self.indexes))

    def _missing_window_block(self, chain: KeyChain, i: int, tokens: int) -> int | None:
        """The last block before `i` that a window group needs for a hit at `tokens` and does not have."""
        worst = None
        for index, reach in zip(self.indexes, self.reaches, strict=True):
            if reach.most is None:
                continue
            first = reach.first_block(tokens, self.block_tokens)
            lowest = first if worst is None else max(first, worst + 1)
            missing = next((j for j in range(i - 1, lowest - 1, -1) if index.find(chain.key(j)) is None), None)
            worst = worst if missing is None else missing
        return worst

    def _reads_something(self, i: int, rows: int) -> bool:
        """Whether any stored row is read after a hit here.

        Where every layer has local chunks, nothing is at their borders: such a hit would be right, and yet no hit.
        """
        tokens = i * self.block_tokens + rows
        return any(
            (rows > 0 and reach.most != 1) or reach.sinks > 0 or reach.first_block(tokens, self.block_tokens) < i
            for reach in self.reaches
        )

    def _result(self, chain: KeyChain, i: int, rows: int, sources: list[int]) -> Match:
        tokens = i * self.block_tokens + rows
        groups = []
        for index, reach, source in zip(self.indexes, self.reaches, sources, strict=True):
            first = min(i, reach.first_block(tokens, self.block_tokens))
            sinks = range(min(first, reach.sink_blocks(self.block_tokens)))
            window, kept = (
                tuple(s for j in blocks if (s := index.find(chain.key(j))) is not None)
                for blocks in (range(first, i), sinks)
            )
            assert (len(window), len(kept)) == (i - first, len(sinks))
            groups.append(GroupMatch(first, window, source, kept))
        return Match(tokens, i, rows, tuple(groups))
