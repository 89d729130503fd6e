"""One engine stepped by hand, one request at a time: what every benchmark times, and how a cold run is proven cold."""

from __future__ import annotations

import itertools
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longctx import LLM, SamplingParams
from longctx.errors import EngineError, LongctxError
from longctx.evals.bench.job import Job
from longctx.events import Event, FinishEvent, TokenEvent

WARM_UP_TOKENS = 64
FIRST_ID = 3
"""Random prompts leave out the lowest ids, where models keep their special tokens."""


@dataclass(frozen=True)
class Sample:
    """One request's run: seconds to the first token and of every decode step after it, and what was computed."""

    ttft_s: float
    step_s: tuple[float, ...]
    token_ids: tuple[int, ...]
    cached_tokens: int
    computed_tokens: int
    prefill_steps: int

    @property
    def mean_step_s(self) -> float:
        return statistics.fmean(self.step_s)


@dataclass
class Prompts:
    """Random token ids below `limit`, never the same prompt twice; the same ones in every run unless `new`.

    A server that outlives a run may have kept the prompts of the last one, so beside it they must be new.
    """

    limit: int
    salt: str = "bench"
    new: bool = False
    _count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._seed = secrets.randbits(32) if self.new else 0

    def fresh(self, n: int) -> list[int]:
        """`n` ids that no prompt before began with."""
        self._count += 1
        rng = np.random.default_rng([self._count, n, self._seed] if self.new else [self._count, n])
        return rng.integers(min(FIRST_ID, self.limit - 1), self.limit, n).tolist()

    def fresh_salt(self) -> str:
        """A salt that shares no cached block with any other."""
        self._count += 1
        return f"{self.salt}-{self._count}"


@contextmanager
def open_engine(job: Job, **options: Any) -> Iterator[tuple[LLM, Any]]:
    """The job's model, loaded and to be stepped by the calling thread, one request at a time."""
    assert job.model is not None
    job.say(f"loading {job.model}")
    with LLM(job.model, **{"max_running": 1, **job.options, **options}) as llm:
        engine = llm.engine
        # The loop that would hear of progress has no part in requests it was not given.
        hears, engine.on_progress = engine.on_progress, None
        try:
            yield llm, engine
        finally:
            for request in list(engine.scheduler.requests()):
                engine.cancel(request.id)
            engine.scheduler.drop_cancelled()
            engine.on_progress = hears


def run_request(
    engine: Any,
    ids: Sequence[int],
    max_tokens: int,
    *,
    salt: str | None = None,
    step: Callable[[Any], list[Event]] | None = None,
) -> Sample:
    """Run one prompt alone, greedily and past any end token; the clock starts before the engine sees it.

    `step(request)` stands in for `engine.step`, for a probe. Raises `EngineError` if a step fails.
    """
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    start = time.perf_counter()
    request = engine.add(ids, params, cache_salt=salt)
    times: list[float] = []
    steps_to_first = 0
    end: FinishEvent | None = None
    while end is None:
        events = engine.step() if step is None else step(request)
        now = time.perf_counter()
        steps_to_first += not times
        for event in events:
            if isinstance(event, TokenEvent):
                times.append(now)
            elif isinstance(event, FinishEvent):
                end = event
    if end.reason == "error":
        raise EngineError(end.error)
    return Sample(
        ttft_s=times[0] - start,
        step_s=tuple(later - sooner for sooner, later in itertools.pairwise(times)),
        token_ids=end.token_ids,
        cached_tokens=end.usage.cached_tokens,
        computed_tokens=end.computed_tokens,
        prefill_steps=steps_to_first,
    )


def run_cold(engine: Any, ids: Sequence[int], max_tokens: int, salt: str, **kwargs: Any) -> Sample:
    """`run_request` of which nothing may come from the cache; raises `EngineError` if anything did."""
    return require_cold(run_request(engine, ids, max_tokens, salt=salt, **kwargs), len(ids))


def require_cold(sample: Sample, num_prompt_tokens: int) -> Sample:
    """Refuse a sample that would report a cache hit as a prefill."""
    if sample.cached_tokens:
        raise EngineError(
            f"a cold run of {num_prompt_tokens} tokens took {sample.cached_tokens} of them from the cache, "
            "so its time is not that of a prefill: the run is void"
        )
    return sample


def warm_up(engine: Any, prompts: Prompts) -> None:
    """Compile or load every kernel and start every thread, so that no measured run pays for it."""
    run_request(engine, prompts.fresh(WARM_UP_TOKENS), 4, salt=prompts.fresh_salt())


def lengths_for(job: Job, defaults: Sequence[int], longest: int, least: int) -> list[int]:
    """The job's lengths, or those of `defaults` that the model has positions for (at least one, however short).

    Raises `LongctxError` for a length given that is beyond the model or too short for one prompt token.
    """
    if job.lengths is None:
        return [n for n in defaults if n <= longest] or [longest]
    for n in job.lengths:
        if n > longest:
            raise LongctxError(
                f"--lengths {n} is beyond the {longest} tokens that {job.model} has room for here: "
                "shorten it, or raise --max-model-len or --kv-memory"
            )
        if n < least:
            raise LongctxError(f"--lengths {n} leaves no prompt: it must be at least {least} here")
    return sorted(job.lengths)


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))
