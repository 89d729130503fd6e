"""Which replica should take a prompt: the one that can answer first, counting what it has cached and what it owes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

PrefillSeconds = Callable[[int, int], float]
"""`(start, tokens)` to the seconds that computing so many tokens behind `start` others takes."""


@dataclass(frozen=True)
class Replica:
    """What a router knows of one replica for one prompt.

    `matched` prompt tokens are in its cache, `queued_s` seconds of work are ahead of a new request, `held_tokens` is
    what it has been given so far and only breaks ties.
    """

    matched: int
    queued_s: float
    held_tokens: int = 0


def expected_ttft_s(replica: Replica, prompt_tokens: int, prefill_s: PrefillSeconds) -> float:
    """Seconds until a replica could answer: its queue, then the part of the prompt that it must compute.

    The last token is always computed, for a cached position has no logits.
    """
    matched = min(replica.matched, prompt_tokens - 1)
    return replica.queued_s + prefill_s(matched, prompt_tokens - matched)


def choose_replica(replicas: Sequence[Replica], prompt_tokens: int, prefill_s: PrefillSeconds) -> int:
    """The index of the replica with the least expected time to first token; of equals the one with the least given.

    One number in seconds stands for both cache and load, so there is no weight to tune: a hit is worth what it saves
    here, and a long queue in front of it costs what it costs.
    """
    if not replicas:
        raise ValueError("there is no replica to choose")
    costs = [(expected_ttft_s(r, prompt_tokens, prefill_s), r.held_tokens, i) for i, r in enumerate(replicas)]
    return min(costs)[2]
