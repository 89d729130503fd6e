"""What a quality suite is asked, and what one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """One invocation. A length is prompt + answer in tokens; what is None is the suite's own.

    `names` are the variants or tasks. Each cell is asked `samples` times. `warm` lets cells share cached blocks; else
    every one must be read cold. `control` says how many cells Hugging Face answers too: one of each length, all, none.
    `kv_formats` and `weights` are those that `drift` compares with the exact ones.
    """

    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] | None = None
    names: tuple[str, ...] | None = None
    haystack: str | None = None
    samples: int = 1
    seed: int = 0
    max_tokens: int | None = None
    warm: bool = False
    control: str = "one"
    out: Path | None = None
    say: Say = lambda line: None
    kv_formats: tuple[str, ...] = ()
    weights: str | None = None


@dataclass(frozen=True)
class Suite:
    """One suite, as the registry lists it. `run` answers the report: `score`, `cells`, `config` and more.

    `names` are what `--tasks` may choose from, the first ones in `default` if nothing is chosen. `table` is the report
    for people where it is not the grid's; `compares_formats` is for one that takes several.
    """

    name: str
    summary: str
    names: Sequence[str]
    default: Sequence[str]
    has_depths: bool
    run: Callable[[EvalJob, Target], dict[str, Any]]
    table: Callable[[Mapping[str, Any]], str] | None = None
    compares_formats: bool = False


def lengths_of(job: EvalJob, target: Target) -> list[int]:
    """The job's lengths, or those of the defaults that the target has room for (at least the shortest)."""
    if job.lengths is not None:
        return sorted(set(job.lengths))
    longest = UNKNOWN_LONGEST if target.longest is None else target.longest
    return [n for n in DEFAULT_LENGTHS if n <= longest] or [longest]
