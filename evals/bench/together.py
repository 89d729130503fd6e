"""Several requests in one engine stepped by hand: who got which token when, and what the step in between cost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from longctx import SamplingParams
from longctx.errors import EngineError
from longctx.events import Event, FinishEvent, TokenEvent


@dataclass(frozen=True)
class Arrival:
    """A prompt that reaches the engine `at_s` seconds after the start; decoded greedily and past any end token."""

    at_s: float
    ids: Sequence[int]
    max_tokens: int
    salt: str | None = None


@dataclass
class Life:
    """One request's times in seconds: its arrival, and each token's; filled while the engine runs."""

    arrival_s: float
    prompt_tokens: int
    token_s: list[float] = field(default_factory=list)
    end: FinishEvent | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrival_s

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies."""
        return [later - sooner for sooner, later in itertools.pairwise(self.token_s)]

    @property
    def cached_tokens(self) -> int:
        assert self.end is not None
        return self.end.usage.cached_tokens


class Together:
    """Steps an engine and keeps the lives of the requests it was given. Raises `EngineError` if one fails."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._start_s = time.perf_counter()
        self.lives: dict[str, Life] = {}

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def add(self, ids: Sequence[int], max_tokens: int, salt: str | None = None, arrival_s: float | None = None) -> str:
        """Queue a prompt now; `arrival_s` says when it should have come, if that was earlier. Answers its id."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = self._engine.add(ids, params, cache_salt=salt)
        self.lives[request.id] = Life(self.now_s() if arrival_s is None else arrival_s, len(ids))
        return str(request.id)

    def step(self) -> list[Event]:
        """One step of the engine; its tokens are noted with the time at which the step ended."""
        events: list[Event] = self._engine.step()
        now_s = self.now_s()
        for event in events:
            if isinstance(event, TokenEvent):
                self.lives[event.request_id].token_s.append(now_s)
            elif isinstance(event, FinishEvent):
                if event.reason == "error":
                    raise EngineError(event.error)
                self.lives[event.request_id].end = event
        return events

    def run(self, arrivals: Sequence[Arrival]) -> list[Life]:
        """Every arrival at its time, until all have ended; idle times are slept through."""
        ids = []
        for arrival in sorted(arrivals, key=lambda a: a.at_s):
            while self.now_s() < arrival.at_s:
                if self._engine.has_work:
                    self.step()
                else:
                    time.sleep(max(0.0, arrival.at_s - self.now_s()))
            ids.append(self.add(arrival.ids, arrival.max_tokens, arrival.salt, arrival.at_s))
        self.drain()
        return [self.lives[i] for i in ids]

    def drain(self) -> None:
        """Step until nothing is left."""
        while self._engine.has_work:
            self.step()


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    assert values, "a percentile of nothing"
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]
