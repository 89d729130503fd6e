"""What a quality suite is asked, and what one is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longctx.evals.target import Target

Say = Callable[[str], None]
"""Hears one line of progress."""

CONTROLS = ("none", "one", "all")
DEFAULT_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
UNKNOWN_LONGEST = 8192
"""The longest default length for a server that does not say how much it takes."""


@dataclass(frozen=True)
class EvalJob:
    """One invocation. A length is prompt + answer in tokens; `lengths` and `names` None are the suite's own.

    `names` are the variants or tasks. Each cell is asked `samples` times. `warm` lets cells share cached blocks; else
    every one must be read cold. `control` says how many cells Hugging Face answers too: one of each length, all, none.
    """

    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    names: tuple[str, ...] | None = None
    haystack: str = "filler"
    samples: int = 1
    seed: int = 0
    max_tokens: int | None = None
    warm: bool = False
    control: str = "one"
    out: Path | None = None
    say: Say = lambda line: None


@dataclass(frozen=True)
class Suite:
    """One suite, as the registry lists it. `run` answers the report: `score`, `cells`, `config` and more.

    `names` are what `--tasks` may choose from, the first ones in `default` if nothing is chosen.
    """

    name: str
    summary: str
    names: Sequence[str]
    default: Sequence[str]
    has_depths: bool
    run: Callable[[EvalJob, Target], dict[str, Any]]


def lengths_of(job: EvalJob, target: Target) -> list[int]:
    """The job's lengths, or those of the defaults that the target has room for (at least the shortest)."""
    if job.lengths is not None:
        return sorted(set(job.lengths))
    longest = UNKNOWN_LONGEST if target.longest is None else target.longest
    return [n for n in DEFAULT_LENGTHS if n <= longest] or [longest]
