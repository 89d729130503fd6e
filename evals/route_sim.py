"""What routing does to a fleet's prefix caches: conversations that grow, replicas with their own caches, a policy."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from longctx.errors import LongctxError
from longctx.routing import Replica, choose_replica

Segment = tuple[str, int]
"""A name that stands for a text, and its tokens. A prompt is a chain of segments; equal beginnings can be reused."""


@dataclass(frozen=True)
class Workload:
    """`users` hold conversations of `turns` prompts, the first of `start_tokens` behind `shared_tokens` that all have.

    Each later prompt is `turn_tokens` longer. `load` is the offered share of the fleet's prefill capacity: 0 lets every
    request finish before the next arrives, 1 keeps everybody busy if nothing is ever reused. `cache_tokens` is what one
    replica can keep (None: everything), `prefill_rate` its tokens per second.
    """

    users: int = 4
    turns: int = 4
    replicas: int = 3
    start_tokens: int = 500
    turn_tokens: int = 200
    shared_tokens: int = 0
    load: float = 0.0
    cache_tokens: int | None = None
    prefill_rate: float = 1000.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "turns", "replicas", "start_tokens"):
            if getattr(self, name) < 1:
                raise LongctxError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("turn_tokens", "shared_tokens"):
            if getattr(self, name) < 0:
                raise LongctxError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0.0 <= self.load < 10.0:
            raise LongctxError(f"load must be between 0 and 10, got {self.load}")
        if not self.prefill_rate > 0:
            raise LongctxError(f"prefill_rate must be positive, got {self.prefill_rate}")
        if self.cache_tokens is not None and self.cache_tokens < 0:
            raise LongctxError(f"cache_tokens must not be negative, got {self.cache_tokens}")

    def prompt(self, user: int, turn: int) -> list[Segment]:
        """What a user sends at a turn: everything so far and the new part."""
        shared = [("shared", self.shared_tokens)] if self.shared_tokens else []
        later = [(f"user {user} turn {t}", self.turn_tokens) for t in range(1, turn + 1)]
        return [*shared, (f"user {user} start", self.start_tokens), *later]


@dataclass
class _Server:
    """One replica: an LRU cache of prompt beginnings, and the time until which it is busy."""

    capacity: int | None
    busy_until_s: float = 0.0
    given_tokens: int = 0
    _chains: OrderedDict[tuple[Segment, ...], int] = field(default_factory=OrderedDict)

    def matched(self, prompt: Sequence[Segment]) -> int:
        tokens = 0
        for end in range(1, len(prompt) + 1):
            if tuple(prompt[:end]) not in self._chains:
                break
            tokens += prompt[end - 1][1]
        return tokens

    def keep(self, prompt: Sequence[Segment]) -> None:
        # Deepest first, so that of one prompt the end is the oldest entry and goes first.
        for end in range(len(prompt), 0, -1):
            chain = tuple(prompt[:end])
            self._chains[chain] = prompt[end - 1][1]
            self._chains.move_to_end(chain)
        while self.capacity is not None and sum(self._chains.values()) > self.capacity:
            self._chains.popitem(last=False)


@dataclass(frozen=True)
class PolicyResult:
    """`prefill_tokens` computed by all replicas, the share of prompt tokens found cached, and times to first token."""

    prefill_tokens: int
    hit_rate: float
    ttft_mean_s: float
    ttft_p95_s: float


Choose = Callable[[Sequence[Replica], int], int]


def _policies(work: Workload) -> dict[str, Choose]:
    turns = iter(range(work.users * work.turns))
    dice = random.Random(work.seed)
    return {
        "round_robin": lambda replicas, _: next(turns) % len(replicas),
        "random": lambda replicas, _: dice.randrange(len(replicas)),
        "least_loaded": lambda replicas, _: min(
            range(len(replicas)), key=lambda i: (replicas[i].queued_s, replicas[i].held_tokens)
        ),
        "cache_aware": lambda replicas, tokens: choose_replica(replicas, tokens, lambda _, n: n / work.prefill_rate),
    }


POLICIES = tuple(_policies(Workload()))


def simulate(work: Workload) -> dict[str, PolicyResult]:
    """Every policy on the same requests at the same times."""
    return {name: _run(work, choose) for name, choose in _policies(work).items()}


def _run(work: Workload, choose: Choose) -> PolicyResult:
    servers = [_Server(work.cache_tokens) for _ in range(work.replicas)]
    computed = asked = 0
    ttfts: list[float] = []
    for now_s, prompt in _arrivals(work):
        tokens = sum(n for _, n in prompt)
        views = [Replica(s.matched(prompt), max(0.0, s.busy_until_s - now_s), s.given_tokens) for s in servers]
        index = choose(views, tokens)
        server, missing = servers[index], tokens - views[index].matched
        server.busy_until_s = max(server.busy_until_s, now_s) + missing / work.prefill_rate
        server.given_tokens += tokens
        server.keep(prompt)
        ttfts.append(server.busy_until_s - now_s)
        computed += missing
        asked += tokens
    ordered = sorted(ttfts)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return PolicyResult(computed, 1 - computed / asked, fmean(ttfts), p95)


def _arrivals(work: Workload) -> Iterator[tuple[float, list[Segment]]]:
    """Times and prompts, turn by turn. Without load in the users' order, one request at a time; with load in random
    order, which keeps round robin from meeting the same replica by luck, and with exponential gaps."""
    dice = random.Random(work.seed + 1)
    sizes = [sum(n for _, n in work.prompt(0, turn)) for turn in range(work.turns)]
    alone_s = max(sizes) / work.prefill_rate
    now_s = 0.0
    for turn in range(work.turns):
        users = list(range(work.users))
        if work.load:
            dice.shuffle(users)
        for user in users:
            yield now_s, work.prompt(user, turn)
            if work.load:
                now_s += dice.expovariate(work.load * work.replicas * work.prefill_rate / fmean(sizes))
            else:
                now_s += alone_s
