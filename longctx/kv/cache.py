"""The KV cache's bookkeeping: which slot holds which tokens, for running requests and for those to come. No tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longctx.kv.groups import LayerGroup
from longctx.kv.index import BlockIndex, common_rows
from longctx.kv.match import GroupMatch, Match, Matcher, first_visible
from longctx.kv.pool import NULL_SLOT, SlotPool
from longctx.kv.table import BlockTable, KeyChain
from longctx.offload.key import BlockKey
from longctx.step import CopyRows

PROMPT_BORDERS = 3
"""Window tails are kept at this many last block borders of a prompt: where the next question will branch off."""


@dataclass(frozen=True)
class CacheStats:
    """Slots of one group: `total` = `free` (no content) + `held` (by requests) + `cached` (content, no request)."""

    group: int
    total: int
    free: int
    held: int
    cached: int


class KVCache:
    """Owns the slots of every layer group, their content and who uses them.

    The promises:
    - A block is findable only after its tokens were computed (`commit`), and never after its slot was handed out again.
    - A findable slot is never written. Full blocks are shared by reference; the rows of a partial hit are copied into a
      block of the request's own.
    - The copies that `admit` answers must run, in order, before the next step computes anything, whatever happens to
      their request meanwhile: their sources may be reused in that very step.
    - Released blocks stay cache entries until their slots are needed, and a chain's tail is reused before its head.

    `num_slots` counts the null slot; a step computes at most `max_chunk_tokens` tokens of a request. `tail_every`: at
    multiples of so many tokens the window groups' blocks are kept as cache entries when they slide out, so that a hit
    can end there.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_slots: Sequence[int],
        block_tokens: int,
        max_chunk_tokens: int,
        *,
        tail_every: int = 8192,
    ):
        assert len(groups) == len(num_slots) > 0 and block_tokens > 0 and max_chunk_tokens > 0
        self._block_tokens = block_tokens
        self._max_chunk = max_chunk_tokens
        self._tail_every = max(1, tail_every // block_tokens) * block_tokens
        self._windows = tuple(group.window for group in groups)
        self._indexes = tuple(BlockIndex() for _ in groups)
        self._pools = tuple(SlotPool(n, index.drop) for n, index in zip(num_slots, self._indexes, strict=True))
        self._matcher = Matcher(self._indexes, self._windows, block_tokens)
        self._pending: dict[BlockKey, str] = {}
        self._live: dict[str, BlockTable] = {}
        self._epoch = 0

    # -- asking --------------------------------------------------------------------------------------------------

    def match(self, chain: KeyChain, limit: int) -> Match:
        """The longest usable prefix of at most `limit` tokens; takes no references.

        Callers pass one less than the number of tokens, so that one is always left to compute logits from.
        """
        return self._matcher.find(chain, limit)

    def pending_owner(self, chain: KeyChain, match: Match) -> str | None:
        """The running request that is going to compute the next full block this chain needs, if there is one."""
        block = match.full_blocks
        return self._pending.get(chain.key(block)) if block < chain.num_full else None

    def slots_needed(self, num_tokens: int) -> tuple[int, ...]:
        """The most slots of each group that one request of `num_tokens` tokens ever holds."""
        return tuple(self._need(window, num_tokens) for window in self._windows)

    def fits(self, match: Match, num_tokens: int, *, reserve: int = 0) -> bool:
        """Could a request with this match be admitted now and get slots for `num_tokens` tokens?

        In full groups `reserve` slots stay free for others, and hits that lie in the free list count once. In window
        groups the most it will hold must fit beside what was promised to the running requests: blocks that they share
        with it may stay with them when it lets go.
        """
        for pool, window, hit, group in zip(
            self._pools, self._windows, match.groups, range(len(self._pools)), strict=True
        ):
            need = self._need(window, num_tokens)
            if window is None:
                if need - len(hit.shared) > pool.num_free - _num_free(pool, hit.shared) - reserve:
                    return False
            elif need > pool.num_usable - sum(table.reserved[group] for table in self._live.values()):
                return False
        return True

    def stats(self) -> list[CacheStats]:
        return [
            CacheStats(g, p.num_usable, p.num_free - p.num_cached, p.num_usable - p.num_free, p.num_cached)
            for g, p in enumerate(self._pools)
        ]

    def _need(self, window: int | None, num_tokens: int) -> int:
        blocks = -(-num_tokens // self._block_tokens)
        return blocks if window is None else min(blocks, self._window_blocks(window, self._max_chunk))

    def _window_blocks(self, window: int, chunk: int) -> int:
        """Blocks that a chunk and the window before it can touch, wherever the chunk begins."""
        return -(-(window + chunk - 2) // self._block_tokens) + 1

    # -- the life of a table -------------------------------------------------------------------------------------

    def admit(
        self, request_id: str, chain: KeyChain, match: Match, num_tokens: int, *, cacheable: bool = True
    ) -> tuple[BlockTable, list[CopyRows]]:
        """Start a request from a match that `fits`: its table, and the row copies of a partial hit.

        Full blocks are referenced; a partial hit gets one block of its own per group. The full blocks among the first
        `num_tokens` tokens (the prompt) that are not yet findable become pending, unless another request was first.
        A request that is not `cacheable` uses hits but leaves nothing behind. Nothing is changed if this raises.
        """
        assert request_id not in self._live, f"request {request_id} is already running"
        assert num_tokens > match.tokens and chain.num_tokens >= num_tokens, "a token must be left to compute"
        self._check_match(chain, match)
        table = BlockTable(
            request_id, chain, len(self._pools), num_prompt_tokens=num_tokens, cacheable=cacheable, epoch=self._epoch
        )
        copies: list[CopyRows] = []
        for group, hit in enumerate(match.groups):
            copies.extend(self._take_hit(table, group, hit, match.partial))
        table.num_computed = match.tokens
        table.num_shared = table.num_published = match.full_blocks
        last = num_tokens // self._block_tokens
        table.borders = {b * self._block_tokens for b in range(max(1, last - PROMPT_BORDERS + 1), last + 1)}
        # The same prompt again may reuse all but its last token.
        table.borders.add(num_tokens - 1)
        self._live[request_id] = table
        if cacheable:
            self._mark_pending(table)
        return table, copies

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Allocate slots for all positions below `num_tokens`; False, and nothing is changed, if slots are short."""
        wanted = -(-num_tokens // self._block_tokens)
        missing = [max(0, wanted - len(column)) for column in table.columns]
        if any(n > pool.num_free for n, pool in zip(missing, self._pools, strict=True)):
            return False
        for column, pool, n in zip(table.columns, self._pools, missing, strict=True):
            column.extend([pool.take() for _ in range(n)])
        return True

    def commit(self, table: BlockTable, num_computed: int) -> None:
        """Tokens below `num_computed` are computed: publish the blocks they filled, then slide the windows.

        A block that no query from `num_computed` on can see leaves the table. If this request made it, it stays
        findable only where a tail is kept.
        """
        self._check_live(table)
        full = num_computed // self._block_tokens
        assert table.num_computed <= num_computed <= min(table.chain.num_tokens, table.num_blocks * self._block_tokens)
        for block in range(table.num_published, full):
            if self._publishes(table):
                key = table.chain.key(block)
                for group in range(len(self._pools)):
                    self._publish(table, group, block, self._block_tokens, key)
            self._drop_pending(table, block)
        table.num_computed = num_computed
        table.num_published = full
        for group in range(len(self._pools)):
            self._slide(table, group)

    def keep_border(self, table: BlockTable, tokens: int) -> None:
        """Another request will go on from this table's first `tokens` tokens: keep the window tail before them."""
        table.borders.add(tokens)

    def release(self, table: BlockTable, *, cache: bool = True) -> None:
        """End a table: finished, cancelled or preempted. Blocks it shares lose one reference, its own are freed.

        What was computed stays behind as cache entries, the partial last block too. With `cache` false the entries
        after the request's own hit are forgotten, except those that others hold.
        """
        self._check_live(table)
        for block in range(table.num_published, table.num_prompt_tokens // self._block_tokens):
            self._drop_pending(table, block)
        publishes = self._publishes(table)
        rows = table.num_computed % self._block_tokens
        if publishes and cache and rows:
            for group in range(len(self._pools)):
                self._publish(table, group, table.num_published, rows, None)
        for group in range(len(self._pools)):
            for slot in reversed(table.held(group)):
                self._pools[group].release(slot, slot in self._indexes[group])
        del self._live[table.request_id]
        if publishes and not cache:
            self._forget_own(table)

    def clear(self) -> None:
        """Forget all content, as when the weights were changed in place.

        What running requests hold stays with them, but is found no more, and they publish nothing from now on.
        """
        for pool, index in zip(self._pools, self._indexes, strict=True):
            for slot in list(index.slots()):
                index.drop(slot)
                pool.forget(slot)
        self._pending.clear()
        self._epoch += 1

    # -- parts of the above --------------------------------------------------------------------------------------

    def _check_live(self, table: BlockTable) -> None:
        assert self._live.get(table.request_id) is table, f"the table of request {table.request_id} was released"

    def _check_match(self, chain: KeyChain, match: Match) -> None:
        for pool, index, window, hit in zip(self._pools, self._indexes, self._windows, match.groups, strict=True):
            for block, slot in enumerate(hit.shared, start=hit.first):
                assert index.find(chain.key(block)) == slot, f"slot {slot} is no longer what was matched"
            if match.partial and window != 1:
                tokens = chain.tokens(match.full_blocks)
                assert hit.source in index, f"slot {hit.source} is no longer what was matched"
                entry = index.entry(hit.source)
                rows = common_rows(entry.tokens, tokens) if entry.parent == chain.parent(match.full_blocks) else 0
                assert rows >= match.partial, f"slot {hit.source} is no longer what was matched"
                assert pool.num_free > _num_free(pool, hit.shared), "admitted although it does not fit"

    def _take_hit(self, table: BlockTable, group: int, hit: GroupMatch, rows: int) -> list[CopyRows]:
        pool, column, window = self._pools[group], table.columns[group], self._windows[group]
        for slot in hit.shared:
            pool.acquire(slot)
        column.extend([NULL_SLOT] * hit.first + list(hit.shared))
        table.first_held[group] = hit.first
        if window is not None:
            # A short prompt may still decode until it fills a window.
            need = self._need(window, table.chain.num_tokens)
            table.reserved[group] = max(need, self._window_blocks(window, 1))
        if not rows or window == 1:
            return []
        pool.touch(hit.source)
        own = pool.take()
        column.extend([own])
        # Where nothing else was free, the entry itself was handed out, rows and all.
        return [] if own == hit.source else [CopyRows(group, hit.source, own, rows)]

    def _mark_pending(self, table: BlockTable) -> None:
        for block in range(table.num_shared, table.num_prompt_tokens // self._block_tokens):
            key = table.chain.key(block)
            if any(index.find(key) is None for index in self._indexes):
                self._pending.setdefault(key, table.request_id)

    def _drop_pending(self, table: BlockTable, block: int) -> None:
        if self._pending and self._pending.get(table.chain.key(block)) == table.request_id:
            del self._pending[table.chain.key(block)]

    def _publishes(self, table: BlockTable) -> bool:
        return table.cacheable and table.epoch == self._epoch

    def _publish(self, table: BlockTable, group: int, block: int, rows: int, key: BlockKey | None) -> None:
        """Make the first `rows` tokens of a block findable, unless another slot already shows them."""
        if block >= len(table.columns[group]):
            return
        pool, index = self._pools[group], self._indexes[group]
        tokens = table.chain.tokens(block)[:rows]
        replaced = index.add(table.columns[group][block], table.chain.parent(block), tokens, key)
        if replaced is not None:
            for slot in replaced:
                pool.forget(slot)
        elif key is not None:
            # Two requests computed the same block; the first one's stays the entry, and was just useful again.
            first = index.find(key)
            assert first is not None
            pool.touch(first)

    def _slide(self, table: BlockTable, group: int) -> None:
        window, column = self._windows[group], table.columns[group]
        first = min(first_visible(window, table.num_computed, self._block_tokens), len(column))
        pool, index = self._pools[group], self._indexes[group]
        for block in range(table.first_held[group], first):
            slot = column[block]
            mine = block >= table.num_shared and pool.refs(slot) == 1
            if mine and slot in index and not self._is_kept(table, window, block):
                index.drop(slot)
            pool.release(slot, slot in index)
            column.clear(block)
        table.first_held[group] = first

    def _is_kept(self, table: BlockTable, window: int | None, block: int) -> bool:
        start = block * self._block_tokens
        periodic = (start // self._tail_every + 1) * self._tail_every
        return any(
            start < border and first_visible(window, border, self._block_tokens) <= block
            for border in (periodic, *table.borders)
        )

    def _forget_own(self, table: BlockTable) -> None:
        for block in range(table.num_shared, table.num_published):
            for pool, index in zip(self._pools, self._indexes, strict=True):
                slot = index.find(table.chain.key(block))
                if slot is not None and pool.refs(slot) == 0:
                    index.drop(slot)
                    pool.forget(slot)

    # -- checking ------------------------------------------------------------------------------------------------

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Recompute every invariant from the tables of all running requests; messages name the slot."""
        tables = list(tables)
        assert {id(t) for t in tables} == {id(t) for t in self._live.values()}, "not the tables that are running"
        for table in tables:
            self._check_table(table)
        for group, (pool, index) in enumerate(zip(self._pools, self._indexes, strict=True)):
            held: dict[int, int] = {}
            for table in tables:
                for slot in table.held(group):
                    held[slot] = held.get(slot, 0) + 1
            index.check_integrity(self._block_tokens)
            pool.check_integrity(held, set(index.slots()))
            for slot in index.slots():
                partial = index.entry(slot).key is None
                assert not (partial and slot in held), f"slot {slot} is held and findable as a partial block"
        for key, owner in self._pending.items():
            table = self._live[owner]
            blocks = range(table.num_published, table.num_prompt_tokens // self._block_tokens)
            assert key in {table.chain.key(b) for b in blocks}, f"request {owner} will not compute a pending block"

    def _check_table(self, table: BlockTable) -> None:
        name = f"request {table.request_id}"
        assert table.num_published == table.num_computed // self._block_tokens, f"{name}: published is not computed"
        for group, (column, window) in enumerate(zip(table.columns, self._windows, strict=True)):
            pool, index = self._pools[group], self._indexes[group]
            first = min(first_visible(window, table.num_computed, self._block_tokens), len(column))
            assert table.first_held[group] == first, f"{name}: group {group} holds from block {table.first_held[group]}"
            if window is not None:
                most = self._window_blocks(window, self._max_chunk)
                assert len(column) - first <= most, f"{name}: group {group} holds {len(column) - first} blocks"
            for block, slot in enumerate(column.tolist()):
                assert (slot == NULL_SLOT) == (block < first), f"{name}: block {block} is slot {slot}"
                if slot in index:
                    assert block < table.num_published, f"slot {slot} is findable before it is computed"
                    assert index.entry(slot).key == table.chain.key(block), f"slot {slot} is found as another block"
                elif table.epoch == self._epoch:
                    assert pool.refs(slot) <= 1, f"slot {slot} is shared but not findable"


def _num_free(pool: SlotPool, slots: Iterable[int]) -> int:
    return sum(pool.refs(slot) == 0 for slot in slots)
