"""What an engine has done since it began, in numbers that only grow."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Kept by the scheduler; read from any thread.

    `prefill_tokens` are prompt tokens that were computed, those computed again after a preemption included, and
    `decode_tokens` those fed back one by one. Of every prompt, `cached_tokens_g1` were found at its first admission
    and `missed_tokens` were not. `finished` are all requests that ended, `cancels` those of them that were cancelled.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens_g1: int = 0
    missed_tokens: int = 0
    preemptions: int = 0
    cancels: int = 0
    finished: int = 0

    def as_dict(self) -> dict[str, int]:
        """A copy by name."""
        return asdict(self)
