"""One layer group's share of the cache: its slots, their content, and what its window lets go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from longctx.attention.reach import Reach
from longctx.kv.index import BlockIndex, common_rows
from longctx.kv.match import GroupMatch, Match
from longctx.kv.pool import NULL_SLOT, SlotPool
from longctx.kv.table import BlockTable, KeyChain
from longctx.offload.key import BlockKey
from longctx.step import CopyRows


class GroupCache:
    """Keeps a pool and an index in step: a slot that is handed out, or whose content is forgotten, has no entry."""

    def __init__(
        self, group: int, reach: Reach, num_slots: int, block_tokens: int, max_chunk_tokens: int, tail_every: int
    ):
        self.group = group
        self.reach = reach
        self.index = BlockIndex()
        self.pool = SlotPool(num_slots, on_reuse=self.index.drop)
        self._block_tokens = block_tokens
        self._num_sinks = reach.sink_blocks(block_tokens)
        self._max_chunk = max_chunk_tokens
        self._tail_every = max(1, tail_every // block_tokens) * block_tokens

    # -- how many slots ------------------------------------------------------------------------------------------

    def need(self, num_tokens: int) -> int:
        """The most slots that a request of `num_tokens` tokens ever holds here."""
        blocks = -(-num_tokens // self._block_tokens)
        return blocks if self._is_full else min(blocks, self.reach.blocks(self._max_chunk, self._block_tokens))

    def promise(self, num_tokens: int) -> int:
        """The slots that admission keeps for one request here: a short prompt may yet decode a window full."""
        return 0 if self._is_full else max(self.need(num_tokens), self.reach.blocks(1, self._block_tokens))

    def fits(self, hit: GroupMatch, num_tokens: int, reserve: int, promised: int) -> bool:
        """Is there room for one more request? See `KVCache.fits`; `promised` is the sum over the running ones."""
        if not self._is_full:
            need = self.promise(num_tokens) if promised else self.need(num_tokens)
            return need <= self.pool.num_usable - promised
        # Hits that lie in the free list are about to leave it.
        free = self.pool.num_free - self._num_unheld(hit.shared)
        return self.need(num_tokens) - len(hit.shared) <= free - reserve

    @property
    def _is_full(self) -> bool:
        return self.reach.most is None

    def _num_unheld(self, slots: Iterable[int]) -> int:
        return sum(self.pool.refs(slot) == 0 for slot in slots)

    def _first_visible(self, tokens: int) -> int:
        return self.reach.first_block(tokens, self._block_tokens)

    # -- a table's slots -----------------------------------------------------------------------------------------

    def check_hit(self, chain: KeyChain, match: Match) -> None:
        """Assert that everything that was matched is still there, and that a slot is free for the copy."""
        hit = match.groups[self.group]
        blocks = [*range(len(hit.sinks)), *range(hit.first, hit.first + len(hit.window))]
        for block, slot in zip(blocks, hit.shared, strict=True):
            assert self.index.find(chain.key(block)) == slot, f"slot {slot} is no longer what was matched"
        if match.partial and self.reach.most != 1:
            rows = 0
            if hit.source in self.index and self.index.entry(hit.source).parent == chain.parent(match.full_blocks):
                rows = common_rows(self.index.entry(hit.source).tokens, chain.tokens(match.full_blocks))
            assert rows >= match.partial, f"slot {hit.source} is no longer what was matched"
            assert self.pool.num_free > self._num_unheld(hit.shared), "admitted although it does not fit"

    def take_hit(self, table: BlockTable, match: Match) -> list[CopyRows]:
        """Fill an empty column: the sinks, null before the window, shared full blocks, an own block for copied rows."""
        hit, column = match.groups[self.group], table.columns[self.group]
        for slot in hit.shared:
            self.pool.acquire(slot)
        # [0, sinks) shared, [sinks, first) null, [first, full blocks) shared, then this request's own.
        column.extend([*hit.sinks, *[NULL_SLOT] * (hit.first - len(hit.sinks)), *hit.window])
        column.first_held, column.num_sinks = hit.first, self._num_sinks
        column.promised = self.promise(table.chain.num_tokens)
        if not match.partial or self.reach.most == 1:
            return []
        self.pool.touch(hit.source)
        own = self.pool.take()
        column.extend([own])
        # Where nothing else was free, the entry itself was handed out, rows and all.
        return [] if own == hit.source else [CopyRows(self.group, hit.source, own, match.partial)]

    def publish(self, table: BlockTable, block: int, tokens: np.ndarray, key: BlockKey | None) -> None:
        """Make the computed rows of a block findable.

        Unless another slot already shows them: of two requests that computed the same block, the first one's is kept.
        """
        column = table.columns[self.group]
        if block < len(column):
            for slot in self.index.add(column[block], table.chain.parent(block), tokens, key):
                self.pool.forget(slot)

    def slide(self, table: BlockTable) -> None:
        """Let go of the blocks that no query from `num_computed` on can see: all before the window but the sinks.

        Those this request made stay findable only where a tail is kept; those it shares are not its to forget.
        """
        column = table.columns[self.group]
        first = min(self._first_visible(table.num_computed), len(column))
        for block in range(max(column.first_held, self._num_sinks), first):
            slot = column[block]
            mine = block >= table.num_shared and self.pool.refs(slot) == 1
            if mine and slot in self.index and not self._is_kept(table, block):
                self.index.drop(slot)
            self.pool.release(slot, slot in self.index)
            column.clear(block)
        column.first_held = first

    def _is_kept(self, table: BlockTable, block: int) -> bool:
        start = block * self._block_tokens
        periodic = (start // self._tail_every + 1) * self._tail_every
        return any(start < p and self._first_visible(p) <= block for p in (periodic, *table.borders))

    def release(self, table: BlockTable) -> None:
        """Drop all references, the last block's first: a chain's tail is reused before its head."""
        for slot in reversed(table.columns[self.group].held()):
            self.pool.release(slot, slot in self.index)

    # -- forgetting ----------------------------------------------------------------------------------------------

    def forget_unheld(self, parent: BlockKey, tokens: np.ndarray) -> None:
        """Forget the entries after `parent` that have a row in common with `tokens`."""
        for slot in self.index.relatives(parent, tokens):
            if self.pool.refs(slot) == 0:
                self.index.drop(slot)
                self.pool.forget(slot)

    def clear(self) -> None:
        for slot in list(self.index.slots()):
            self.index.drop(slot)
            self.pool.forget(slot)

    # -- checking ------------------------------------------------------------------------------------------------

    def check_integrity(self, tables: Sequence[BlockTable], epoch: int) -> None:
        held: dict[int, int] = {}
        for table in tables:
            self._check_column(table, epoch)
            for slot in table.columns[self.group].held():
                held[slot] = held.get(slot, 0) + 1
        self.index.check_integrity(self._block_tokens)
        self.pool.check_integrity(held, set(self.index.slots()))
        for slot in self.index.slots():
            partial = self.index.entry(slot).key is None
            assert not (partial and slot in held), f"slot {slot} is held and findable as a partial block"

    def _check_column(self, table: BlockTable, epoch: int) -> None:
        name, column = f"request {table.request_id}, group {self.group}", table.columns[self.group]
        first = min(self._first_visible(table.num_computed), len(column))
        assert column.first_held == first, f"{name} holds from block {column.first_held}, sees from {first}"
        if not self._is_full:
            most, num_held = self.reach.blocks(self._max_chunk, self._block_tokens), len(column.held())
            assert num_held <= most, f"{name} holds {num_held} blocks, the most is {most}"
        assert column.num_sinks == self._num_sinks, f"{name} keeps {column.num_sinks} sink blocks"
        for block, slot in enumerate(column.tolist()):
            slid_out = self._num_sinks <= block < first
            assert (slot == NULL_SLOT) == slid_out, f"{name}: block {block} is slot {slot}"
            if slot in self.index:
                assert block < table.num_published, f"slot {slot} is findable before it is computed"
                assert self.index.entry(slot).key == table.chain.key(block), f"slot {slot} is found as another block"
            elif table.epoch == epoch:
                assert self.pool.refs(slot) <= 1, f"slot {slot} is shared but not findable"
