"""The KV cache's bookkeeping: which slot holds which tokens, for running requests and for those to come. No tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longctx.kv.group_cache import GroupCache
from longctx.kv.groups import LayerGroup
from longctx.kv.match import Match, Matcher
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
        self._groups = tuple(
            GroupCache(g, group.reach, slots, block_tokens, max_chunk_tokens, tail_every)
            for g, (group, slots) in enumerate(zip(groups, num_slots, strict=True))
        )
        self._matcher = Matcher([g.index for g in self._groups], [g.reach for g in self._groups], block_tokens)
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
        return tuple(group.need(num_tokens) for group in self._groups)

    def fits(self, match: Match, num_tokens: int, *, reserve: int = 0) -> bool:
        """Could a request with this match be admitted now and get slots for `num_tokens` tokens?

        In full groups `reserve` slots stay free for others, and hits that lie in the free list count once. In window
        groups the most it will hold must fit beside what was promised to the running requests: blocks that they share
        with it may stay with them when it lets go.
        """
        promised = [sum(table.columns[g].promised for table in self._live.values()) for g in range(len(self._groups))]
        return all(
            group.fits(hit, num_tokens, reserve, p)
            for group, hit, p in zip(self._groups, match.groups, promised, strict=True)
        )

    def stats(self) -> list[CacheStats]:
        pools = [group.pool for group in self._groups]
        return [
            CacheStats(g, p.num_usable, p.num_free - p.num_cached, p.num_usable - p.num_free, p.num_cached)
            for g, p in enumerate(pools)
        ]

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
        for group in self._groups:
            group.check_hit(chain, match)
        table = BlockTable(
            request_id, chain, len(self._groups), num_prompt_tokens=num_tokens, cacheable=cacheable, epoch=self._epoch
        )
        copies = [copy for group in self._groups for copy in group.take_hit(table, match)]
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
        if any(n > group.pool.num_free for n, group in zip(missing, self._groups, strict=True)):
            return False
        for column, group, n in zip(table.columns, self._groups, missing, strict=True):
            column.extend([group.pool.take() for _ in range(n)])
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
                for group in self._groups:
                    group.publish(table, block, table.chain.tokens(block), table.chain.key(block))
            self._drop_pending(table, block)
        table.num_computed = num_computed
        table.num_published = full
        for group in self._groups:
            group.slide(table)

    def keep_border(self, table: BlockTable, tokens: int) -> None:
        """Another request will go on from this table's first `tokens` tokens: keep the window tail before them."""
        table.borders.add(tokens)

    def release(self, table: BlockTable, *, cache: bool = True) -> None:
        """End a table: finished, cancelled or preempted. Blocks it shares lose one reference, its own are freed.

        What was computed stays behind as cache entries, the partial last block too. With `cache` false nothing on this
        request's path is found again, its own hit included, except what others hold: its numbers are not to be trusted.
        """
        self._check_live(table)
        for block in range(table.num_published, table.num_prompt_tokens // self._block_tokens):
            self._drop_pending(table, block)
        rows = table.num_computed % self._block_tokens
        if self._publishes(table) and cache and rows:
            tokens = table.chain.tokens(table.num_published)[:rows]
            for group in self._groups:
                group.publish(table, table.num_published, tokens, None)
        for group in self._groups:
            group.release(table)
        del self._live[table.request_id]
        if table.epoch == self._epoch and not cache:
            for block in range(table.num_published + 1):
                for group in self._groups:
                    group.forget_unheld(table.chain.parent(block), table.chain.tokens(block))

    def clear(self) -> None:
        """Forget all content, as when the weights were changed in place.

        What running requests hold stays with them, but is found no more, and they publish nothing from now on.
        """
        for group in self._groups:
            group.clear()
        self._pending.clear()
        self._epoch += 1

    # -- parts of the above --------------------------------------------------------------------------------------

    def _check_live(self, table: BlockTable) -> None:
        assert self._live.get(table.request_id) is table, f"the table of request {table.request_id} was released"

    def _mark_pending(self, table: BlockTable) -> None:
        for block in range(table.num_shared, table.num_prompt_tokens // self._block_tokens):
            key = table.chain.key(block)
            if any(group.index.find(key) is None for group in self._groups):
                self._pending.setdefault(key, table.request_id)

    def _drop_pending(self, table: BlockTable, block: int) -> None:
        if self._pending and self._pending.get(table.chain.key(block)) == table.request_id:
            del self._pending[table.chain.key(block)]

    def _publishes(self, table: BlockTable) -> bool:
        return table.cacheable and table.epoch == self._epoch

    # -- checking ------------------------------------------------------------------------------------------------

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Recompute every invariant from the tables of all running requests; messages name the slot."""
        tables = list(tables)
        assert {id(t) for t in tables} == {id(t) for t in self._live.values()}, "not the tables that are running"
        for table in tables:
            computed = table.num_computed // self._block_tokens
            assert table.num_published == computed, f"request {table.request_id} published blocks it did not compute"
        for group in self._groups:
            group.check_integrity(tables, self._epoch)
        for owner in set(self._pending.values()):
            table = self._live[owner]
            blocks = range(table.num_published, table.num_prompt_tokens // self._block_tokens)
            marked = {key for key, marker in self._pending.items() if marker == owner}
            assert marked <= {table.chain.key(b) for b in blocks}, f"request {owner} will not compute a pending block"
