"""Random lives of many requests against the naive memory: whatever is reused has exactly the right content."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from longctx.attention.reach import Reach
from tests.helpers.kv import CacheDriver, Job, usable

# Few documents and tokens, cut anywhere, so that chains meet, branch inside blocks and repeat.
DOCUMENTS = st.sampled_from([(0,) * 48, (0, 1, 1) * 16, (0,) * 14 + (1, 0, 0, 1) * 8])
CUTS = st.integers(1, 46) | st.sampled_from([4, 15, 16, 17, 32, 40])
TOKENS = st.lists(st.integers(0, 1), max_size=9)
PROMPTS = st.builds(lambda document, n, end: [*document[:n], *end[:5]], DOCUMENTS, CUTS, TOKENS)
SALTS = st.sampled_from([None] * 5 + ["a"])
USUALLY = st.sampled_from([True] * 5 + [False])
SINKS, CHUNK = Reach(6, 3), Reach(local_chunk=8)
WINDOWS = st.sampled_from(
    [
        *((None,), (None, 6), (5,), (None, 3, 9), (None, 1), (None, None), (4, None, 4), (17,)),
        *(
            (SINKS,),
            (5, SINKS),
            (None, Reach(9, 8)),
            (Reach(12, 10),),
            (CHUNK,),
            (None, CHUNK),
            (Reach(local_chunk=4), 6),
        ),
    ]
)
WHO = st.integers(0, 9)


class CacheMachine(RuleBasedStateMachine):
    waiting = Bundle("waiting")

    @initialize(
        windows=WINDOWS,
        slots=st.integers(16, 34),
        chunk=st.sampled_from([1, 3, 8]),
        tail_every=st.sampled_from([8, 8192]),
    )
    def start(self, windows, slots, chunk, tail_every):
        self.driver = CacheDriver(windows, [slots] * len(windows), chunk=chunk, tail_every=tail_every)

    @property
    def running(self) -> list[Job]:
        return self.driver.running

    def pick(self, i: int) -> Job:
        return self.running[i % len(self.running)]

    def come(self, job: Job) -> bool:
        """Look up, compare with the definition, and admit if there is room."""
        best = max(p for p in range(len(job.tokens)) if usable(self.driver, job, p))
        match = self.driver.match(job)
        assert match.tokens == best, f"matched {match.tokens}, {best} was possible"
        return self.driver.admit(job)

    def go(self, job: Job, new: list[int]) -> None:
        """Prefill in chunks and decode, as far as the slots last."""
        while left := len(job.tokens) - job.table.num_computed:
            if not self.driver.step(job, min(left, self.driver.chunk)):
                return
        all(self.driver.decode(job, token) for token in new)

    @rule(tokens=PROMPTS, salt=SALTS, cacheable=USUALLY)
    def arrive(self, tokens, salt, cacheable):
        self.come(self.driver.job(tokens, salt=salt, cacheable=cacheable))

    @rule(tokens=PROMPTS, salt=SALTS, new=TOKENS, cacheable=USUALLY, cache=USUALLY)
    def live(self, tokens, salt, new, cacheable, cache):
        job = self.driver.job(tokens, salt=salt, cacheable=cacheable)
        if self.come(job):
            self.go(job, new)
            self.driver.release(job, cache=cache)

    @rule(job=waiting)
    def resume(self, job):
        if job not in self.running:
            self.come(job)

    @precondition(lambda self: self.running)
    @rule(i=WHO, n=st.integers(1, 8))
    def compute(self, i, n):
        job = self.pick(i)
        left = len(job.tokens) - job.table.num_computed
        if left and not self.driver.step(job, min(n, left, self.driver.chunk)) and self.running[-1] is not job:
            self.driver.release(self.running[-1])

    @precondition(lambda self: self.running)
    @rule(i=WHO, new=TOKENS)
    def compute_all(self, i, new):
        self.go(self.pick(i), new)

    @precondition(lambda self: self.running)
    @rule(target=waiting, i=WHO, cache=USUALLY)
    def preempt_or_finish(self, i, cache):
        job = self.pick(i)
        self.driver.release(job, cache=cache)
        return job if cache else multiple()

    @precondition(lambda self: self.running)
    @rule(i=WHO, tokens=st.integers(1, 60))
    def keep_border(self, i, tokens):
        self.driver.cache.keep_border(self.pick(i).table, tokens)

    @precondition(lambda self: self.driver.cached() > 12)
    @rule()
    def clear(self):
        self.driver.cache.clear()
        self.driver.check()
        assert all(s.cached == 0 for s in self.driver.cache.stats())

    @invariant()
    def every_slot_is_somewhere(self):
        if hasattr(self, "driver"):
            assert all(s.free + s.held + s.cached == s.total for s in self.driver.cache.stats())

    def teardown(self):
        if hasattr(self, "driver"):
            for job in list(self.running):
                self.driver.release(job)
            assert all(s.held == 0 for s in self.driver.cache.stats())
            assert not self.driver.cache._pending


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
