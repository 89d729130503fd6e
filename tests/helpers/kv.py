"""A KV cache with a naive memory behind it that knows, for every row of every slot, what was written there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from longctx.attention.reach import Reach
from longctx.kv.cache import KVCache
from longctx.kv.groups import GroupKey, LayerGroup
from longctx.kv.match import Match
from longctx.kv.table import BlockTable, KeyChain
from longctx.offload.key import KeySpace, root_key
from longctx.quant.formats import FORMATS
from longctx.quant.layout import BlockLayout
from longctx.step import CopyRows

SPACE = KeySpace("weights", "config", "float32", "plain", ("fp32/fp32",), 4, "exact")


def reach_of(window: int | Reach | None) -> Reach:
    return window if isinstance(window, Reach) else Reach(window)


def make_groups(*windows: int | Reach | None, block_tokens: int = 4) -> tuple[LayerGroup, ...]:
    fp32 = FORMATS["fp32"]
    layout = BlockLayout(1, 1, block_tokens, 4, 4, fp32, fp32)
    keys = [
        GroupKey(r.window, 1, 4, 4, "fp32", "fp32", sinks=r.sinks, local_chunk=r.local_chunk)
        for r in map(reach_of, windows)
    ]
    return tuple(LayerGroup(i, key, (i,), layout) for i, key in enumerate(keys))


def sees(reach: Reach, query: int) -> list[int]:
    """The positions a query sees, from the definition."""
    if reach.local_chunk is not None:
        return [p for p in range(query + 1) if p // reach.local_chunk == query // reach.local_chunk]
    return [p for p in range(query + 1) if reach.window is None or query - p < reach.window or p < reach.sinks]


@dataclass(eq=False)
class Job:
    """A request as the driver sees it; `content[p]` identifies tokens [0, p] and the namespace."""

    id: str
    tokens: list[int]
    chain: KeyChain
    salt: str | None
    cacheable: bool = True
    num_prompt: int = 0
    table: BlockTable | None = None
    cached: int = 0
    content: list[int] = field(default_factory=list)

    def content_at(self, position: int) -> int:
        while len(self.content) <= position:
            p = len(self.content)
            self.content.append(hash((self.content[p - 1] if p else self.salt, self.tokens[p])))
        return self.content[position]


class CacheDriver:
    """Runs requests through a cache as a scheduler and a runner would, and checks every row that a query reads.

    A write into a slot that can be found, or a read of anything but the right content, fails at once; if `checked`,
    integrity is checked after every call.
    """

    def __init__(
        self,
        windows: Sequence[int | Reach | None],
        num_slots: Sequence[int],
        *,
        block_tokens: int = 4,
        chunk: int = 8,
        tail_every: int = 8192,
        checked: bool = True,
    ):
        self._checked = checked
        self.reaches, self.block_tokens, self.chunk = tuple(map(reach_of, windows)), block_tokens, chunk
        self.cache = KVCache(
            make_groups(*windows, block_tokens=block_tokens), num_slots, block_tokens, chunk, tail_every=tail_every
        )
        self.memory: list[dict[tuple[int, int], int]] = [{} for _ in windows]
        self.copies: list[CopyRows] = []
        self.running: list[Job] = []
        self.computed = 0
        self._num_jobs = 0

    def job(self, tokens: Sequence[int], *, salt: str | None = None, cacheable: bool = True) -> Job:
        own = list(tokens)
        chain = KeyChain(root_key(SPACE, regime=0, salt=salt), self.block_tokens, own)
        self._num_jobs += 1
        return Job(f"r{self._num_jobs}", own, chain, salt, cacheable, len(own))

    def match(self, job: Job) -> Match:
        return self.cache.match(job.chain, len(job.tokens) - 1)

    def admit(self, job: Job) -> bool:
        """Admit if it fits; says whether it did."""
        match = self.match(job)
        if not self.cache.fits(match, len(job.tokens)):
            self.check()
            return False
        job.table, copies = self.cache.admit(job.id, job.chain, match, len(job.tokens), cacheable=job.cacheable)
        job.cached = match.tokens
        assert job.cached < len(job.tokens)
        self.copies.extend(copies)
        self.running.append(job)
        self.check()
        return True

    def step(self, job: Job, n: int) -> bool:
        """Compute the next `n` tokens; False if there are no slots for them."""
        assert job.table is not None
        start = job.table.num_computed
        if not self.cache.extend(job.table, start + n):
            self.check()
            return False
        self.check()
        self._run_copies()
        tables = job.table.arrays()
        for group, table in enumerate(tables):
            for p in range(start, start + n):
                slot = int(table[p // self.block_tokens])
                assert slot not in self.cache._groups[group].index, f"slot {slot} is written while it can be found"
                self.memory[group][slot, p % self.block_tokens] = job.content_at(p)
        for p in range(start, start + n):
            self._read(job, tables, p)
        self.computed += n
        self.cache.commit(job.table, start + n)
        self.check()
        return True

    def _run_copies(self) -> None:
        for copy in self.copies:
            memory = self.memory[copy.group]
            for row in range(copy.rows):
                memory[copy.dst, row] = memory[copy.src, row]
        self.copies.clear()

    def _read(self, job: Job, tables: Sequence, query: int) -> None:
        for group, reach in enumerate(self.reaches):
            for p in sees(reach, query):
                slot = int(tables[group][p // self.block_tokens])
                found = self.memory[group].get((slot, p % self.block_tokens))
                assert slot != 0 and found == job.content_at(p), f"{job.id}: query {query} reads a wrong row at {p}"

    def prefill(self, job: Job) -> None:
        """Compute all that is left, in chunks."""
        assert job.table is not None
        while job.table.num_computed < len(job.tokens):
            assert self.step(job, min(self.chunk, len(job.tokens) - job.table.num_computed))

    def decode(self, job: Job, token: int) -> bool:
        """Append a token and compute it; takes the token back if there is no slot."""
        job.tokens.append(token)
        if self.step(job, 1):
            return True
        job.tokens.pop()
        return False

    def release(self, job: Job, *, cache: bool = True) -> None:
        assert job.table is not None
        self.cache.release(job.table, cache=cache)
        job.table = None
        self.running.remove(job)
        self.check()

    def run(self, tokens: Sequence[int], new: Sequence[int] = (), **options) -> Job:
        """One request alone, from admission to release, with `new` generated tokens."""
        job = self.job(tokens, **options)
        assert self.admit(job)
        self.prefill(job)
        for token in new:
            assert self.decode(job, token)
        self.release(job)
        return job

    def check(self) -> None:
        if self._checked:
            self.cache.check_integrity([job.table for job in self.running if job.table is not None])

    def held(self, group: int = 0) -> int:
        return self.cache.stats()[group].held

    def cached(self, group: int = 0) -> int:
        return self.cache.stats()[group].cached

    def free(self, group: int = 0) -> int:
        return self.cache.stats()[group].free


def usable(driver: CacheDriver, job: Job, tokens: int) -> bool:
    """Whether a hit at `tokens` is possible, by the definition: what a query there reads is there, and not nothing."""
    size, rows_read = driver.block_tokens, 0
    for index, reach in zip([g.index for g in driver.cache._groups], driver.reaches, strict=True):
        rows_read += sum(p < tokens for p in sees(reach, tokens))
        for block in sorted({p // size for p in sees(reach, tokens) if p < tokens}):
            wanted = job.tokens[block * size : min(tokens, (block + 1) * size)]
            children = [index.entry(s) for s in index.slots() if index.entry(s).parent == job.chain.parent(block)]
            if not any(list(e.tokens[: len(wanted)]) == wanted for e in children):
                return False
    return rows_read > 0 or tokens == 0
