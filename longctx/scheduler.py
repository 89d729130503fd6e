"""Decides what each step computes: admission, chunks, preemption, and what a finished step means."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longctx.config import SchedulerConfig
from longctx.counters import Counters
from longctx.errors import QueueFullError
from longctx.events import Event
from longctx.kv.cache import KVCache, Match
from longctx.kv.memory import max_scored
from longctx.rates import Rates, Row
from longctx.request import Request, Status
from longctx.step import CopyRows, RowResult, StepRow, StepSpec

LEAST_CHUNK = 16
"""Prompt tokens in every step, even where reading the weights alone takes longer than the step's time: with one token
each time a long prompt would never end, and so many more cost little beside the weights."""

PREFILL_RESERVE = 4
"""The oldest prefill keeps at least one part in this many of every step; shorter ones go first with the rest."""


@dataclass
class _Planned:
    request: Request
    n: int


class Scheduler:
    """Owns every live request. One rule for all tokens: give a request tokens until num_computed == num_tokens.

    Prefill, decode, resume after a preemption and the recomputed last token of a full hit differ only in `n`. The
    oldest running request is never preempted for a younger one, and a request that was preempted comes back only when
    its whole remaining need fits beside the older ones', so two requests cannot chase each other for ever.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCache, rates: Rates, vocab_size: int, block_tokens: int):
        self._config = config
        self._cache = cache
        self._rates = rates
        self._score_chunk = max_scored(vocab_size)
        self._block_tokens = block_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.live: dict[str, Request] = {}
        self.counters = Counters()
        self._added = 0
        self._step: dict[str, Row] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def requests(self) -> list[Request]:
        return list(self.live.values())

    @property
    def num_queued(self) -> int:
        """Requests that have not run yet; those that were preempted keep the places they had. For any thread."""
        return sum(r.preemptions == 0 for r in list(self.waiting))

    def check_queue(self, num_coming: int = 0) -> None:
        """`QueueFullError` when there is no place for one more request beside `num_coming` that are on their way."""
        queued = num_coming + self.num_queued
        if queued >= self._config.max_queue:
            raise QueueFullError(f"the queue holds {queued} requests, its limit; try again later or raise max_queue")

    def add(self, request: Request) -> None:
        """Queue a request, whatever the queue holds."""
        self._added += 1
        request.order = self._added
        self.live[request.id] = request
        self.waiting.append(request)

    # -- planning ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepSpec:
        """The next step: one token for every decoding request, then prompt tokens under the time cap."""
        copies = self._admit()
        decodes = self._place([_Planned(r, 1) for r in self.running if not r.in_prefill])
        contexts = [p.request.num_computed for p in decodes]
        prefills = self._place(self._share([r for r in self.running if r.in_prefill], contexts))
        rows = [self._row(p) for p in (*decodes, *prefills) if p.request.status is Status.RUNNING]
        self._step = {row.request_id: (row.start, row.n) for row in rows}
        return StepSpec(tuple(rows), tuple(copies))

    def _admit(self) -> list[CopyRows]:
        """Move waiting requests to running, oldest first, while memory lasts; those that wait for a block stay."""
        copies: list[CopyRows] = []
        for request in list(self.waiting):
            if len(self.running) >= self._config.max_running:
                break
            # A cached position has no logits: scoring goes on, at the latest, where it was preempted.
            limit = request.num_tokens - 1
            if request.scoring:
                assert request.sheet is not None
                limit = request.sheet.num_scored
            match = self._cache.match(request.chain, limit)
            owner = None if request.scoring else self._cache.pending_owner(request.chain, match)
            if owner is not None:
                # Its next block is being computed: wait for it, and have the window before that border kept.
                self._keep_common_border(owner, request)
                continue
            if not self._fits(request, match):
                break
            self.waiting.remove(request)
            copies.extend(self._start(request, match))
        return copies

    def _keep_common_border(self, owner_id: str, follower: Request) -> None:
        owner = next(r for r in self.running if r.id == owner_id)
        assert owner.table is not None
        blocks = min(follower.chain.num_full, owner.chain.num_full)
        # Chained keys agree up to the last common block and differ from there on.
        common = bisect.bisect_left(range(blocks), True, key=lambda i: follower.chain.key(i) != owner.chain.key(i))
        self._cache.keep_border(owner.table, common * self._block_tokens)

    def _fits(self, request: Request, match: Match) -> bool:
        resumed = request.preemptions > 0
        target = request.max_kv_tokens if resumed else request.num_tokens
        reserve = 0
        for other in self.running:
            assert other.table is not None
            whole = other.max_kv_tokens if resumed or other.preemptions > 0 else other.num_tokens
            reserve += max(0, self._blocks(whole) - other.table.num_blocks)
        return self._cache.fits(match, target, reserve=reserve)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def _start(self, request: Request, match: Match) -> list[CopyRows]:
        request.table, copies = self._cache.admit(
            request.id, request.chain, match, request.num_tokens, cacheable=request.cacheable
        )
        request.num_computed = match.tokens
        if request.scoring:
            assert request.sheet is not None
            request.sheet.rewind(match.tokens)
        request.status = Status.RUNNING
        if request.cached_tokens is None:
            request.cached_tokens = match.tokens
            request.start_s = time.perf_counter()
            self.counters.cached_tokens_g1 += match.tokens
            self.counters.missed_tokens += request.num_prompt_tokens - match.tokens
        bisect.insort(self.running, request, key=lambda r: r.order)
        return copies

    def _share(self, prefills: Sequence[Request], decodes: Sequence[int]) -> list[_Planned]:
        """Split the step's prompt tokens: shortest remainder first, a reserve for the oldest."""
        if not prefills:
            return []
        left = self._chunk_budget(prefills, decodes)
        oldest = prefills[0]
        reserve = -(-left // PREFILL_RESERVE)
        score_left = self._score_chunk
        score_reserve = -(-score_left // PREFILL_RESERVE) if oldest.scoring else 0
        planned: list[_Planned] = []
        for request in sorted(prefills, key=lambda r: r.num_tokens - r.num_computed):
            oldest_served = request is oldest or any(p.request is oldest for p in planned)
            n = min(request.num_ahead, left - (0 if oldest_served else reserve))
            if request.scoring:
                n = min(n, score_left - (0 if oldest_served else score_reserve))
            if n > 0:
                planned.append(_Planned(request, n))
                left -= n
                score_left -= n if request.scoring else 0
        return planned

    def _chunk_budget(self, prefills: Sequence[Request], decodes: Sequence[int]) -> int:
        if self._config.chunk_tokens is not None:
            return self._config.chunk_tokens
        cap_s = self._config.step_seconds
        if decodes:
            cap_s = min(cap_s, self._config.itl_target_s)
        start, most = max(r.num_computed for r in prefills), self._config.max_chunk_tokens
        chunk = self._rates.largest_chunk(start, cap_s, decodes=decodes, maximum=most)
        return max(chunk, min(LEAST_CHUNK, most))

    def _place(self, planned: Sequence[_Planned]) -> list[_Planned]:
        """Give slots to what was planned, oldest request first; the youngest pays when there are none left."""
        placed = []
        for item in sorted(planned, key=lambda p: p.request.order):
            if item.request.status is Status.RUNNING and self._make_room(item.request, item.n):
                placed.append(item)
        return placed

    def _make_room(self, request: Request, n: int) -> bool:
        assert request.table is not None
        while not self._cache.extend(request.table, request.num_computed + n):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to waiting; what was computed stays behind as cache entries and is matched again on resume."""
        self._release(request)
        request.num_computed = 0
        request.status = Status.WAITING
        request.preemptions += 1
        self.counters.preemptions += 1
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def _release(self, request: Request, *, cache: bool = True) -> None:
        assert request.table is not None
        self._cache.release(request.table, cache=cache)
        request.table = None
        self.running.remove(request)

    def _row(self, planned: _Planned) -> StepRow:
        request, start, end = planned.request, planned.request.num_computed, planned.request.num_computed + planned.n
        assert request.table is not None
        targets = None
        if request.scoring:
            # The last position has no next token; its target is a placeholder that nobody reads.
            targets = np.array([*request.token_ids[start + 1 : end + 1], 0][: planned.n], dtype=np.int64)
        sample = end == request.num_tokens and request.score is None
        return StepRow(
            request.id,
            start,
            np.array(request.token_ids[start:end], dtype=np.int64),
            request.table.arrays(),
            request.num_prompt_tokens,
            request.regime,
            request.params,
            request.seed,
            sample=sample,
            targets=targets,
            want_logits=request.score is not None and request.score.want_logits,
            history=request.history() if sample else None,
        )

    # -- after a step --------------------------------------------------------------------------------------------

    def commit(self, step: StepSpec, results: Sequence[RowResult]) -> list[Event]:
        """Publish what was computed, take the new tokens, finish what is done."""
        now_s = time.perf_counter()
        events: list[Event] = []
        self.counters.steps += bool(step.rows)
        for row, result in zip(step.rows, results, strict=True):
            request = self.live[row.request_id]
            assert request.table is not None and request.num_computed == row.start
            was_prefill = request.in_prefill
            request.num_computed += row.n
            request.computed_tokens += row.n
            if was_prefill:
                self.counters.prefill_tokens += row.n
            else:
                self.counters.decode_tokens += row.n
            self._cache.commit(request.table, request.num_computed)
            if was_prefill:
                events.append(self.progress(request, 0))
            events.extend(self._take(request, result, now_s))
        return events

    def _take(self, request: Request, result: RowResult, now_s: float) -> list[Event]:
        if result.error is not None:
            # Logits that are not numbers come from keys and values that are not: nobody may go on from them.
            return [self._finish(request, "error", now_s, result.error, cache=False)]
        if result.scores is not None:
            assert request.sheet is not None
            request.sheet.take(result)
        if request.score is not None:
            return [self._finish(request, "scored", now_s)] if request.num_computed == request.num_tokens else []
        if result.token_id is None:
            return []
        event, reason = request.append(result.token_id, now_s, result.logprobs)
        return [event] if reason is None else [event, self._finish(request, reason, now_s)]

    def _finish(
        self, request: Request, reason: str, now_s: float, error: str | None = None, *, cache: bool = True
    ) -> Event:
        del self.live[request.id]
        self.counters.cancels += reason == "cancelled"
        self.counters.finished += 1
        if request.status is Status.RUNNING:
            self._release(request, cache=cache)
        else:
            self.waiting.remove(request)
        return request.finish(reason, now_s, error)

    def drop_cancelled(self) -> list[Event]:
        """Finish every request whose cancellation was asked for; what it computed stays as cache entries."""
        now_s = time.perf_counter()
        return [self._finish(r, "cancelled", now_s) for r in self.requests() if r.cancelled]

    def fail(self, step: StepSpec, error: str) -> list[Event]:
        """Finish the requests of a step that raised; others start again if nobody knows what was copied for them."""
        failed = {row.request_id for row in step.rows}
        now_s = time.perf_counter()
        events = [self._finish(r, "error", now_s, error) for r in list(self.running) if r.id in failed]
        targets = {(copy.group, copy.dst) for copy in step.copies}
        for request in list(self.running) if targets else ():
            assert request.table is not None
            if any((g, slot) in targets for g, slots in enumerate(request.table.slots) for slot in slots):
                self._preempt(request)
        return events

    # -- telling -------------------------------------------------------------------------------------------------

    def progress(self, request: Request, extra_tokens: int) -> Event:
        """Where a running prefill stands, `extra_tokens` beyond its last commit; it is expected to go on in steps like
        the latest."""
        done = request.num_computed + extra_tokens
        left = request.num_prompt_tokens - done
        eta_s = self._rates.remaining_seconds(self._step[request.id], list(self._step.values()), done, left)
        return request.progress(time.perf_counter(), done, eta_s)

    def queue_progress(self) -> list[Event]:
        """One event per waiting request, with its place in the queue."""
        now_s = time.perf_counter()
        return [r.progress(now_s, r.reported, None, i + 1) for i, r in enumerate(self.waiting)]
