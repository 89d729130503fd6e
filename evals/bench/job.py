"""What a benchmark is asked, what it answers, and what one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longctx.evals.bench.floors import Floor
from longctx.evals.bench.limits import Limits

Say = Callable[[str], None]
"""Hears one line of progress."""


@dataclass(frozen=True)
class Job:
    """One invocation. `lengths` and `tokens` None are the benchmark's own; a length is prompt + generated tokens.

    `options` are those of `longctx.LLM`. `against` names another system to be measured beside this one.
    `trace` is a file of requests to replay, `speedup` times as fast as they came.
    """

    model: str | None = None
    lengths: tuple[int, ...] | None = None
    tokens: int | None = None
    repeats: int = 3
    against: str | None = None
    profile: bool = False
    trace: str | None = None
    speedup: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    say: Say = lambda line: None


@dataclass(frozen=True)
class Row:
    """One cell: `figures` by name, and `measured_s`, which is compared with `floor`.

    `derived`, if given, adds or replaces figures that need the machine's limits, known only after the last run.
    """

    model: str | None
    tokens: int | None
    figures: Mapping[str, Any]
    measured_s: float | None = None
    floor: Floor | None = None
    derived: Callable[[Limits], Mapping[str, Any]] | None = None

    def to_json(self, limits: Limits) -> dict[str, Any]:
        """The row as it is reported; `limit` is the floor in seconds, `share_of_limit` the floor over the measured."""
        limit_s = None if self.floor is None else self.floor.seconds(limits)
        share = multiple = None
        if limit_s is not None and self.measured_s:
            share, multiple = limit_s / self.measured_s, self.measured_s / limit_s
        return {
            "model": self.model,
            "tokens": self.tokens,
            **self.figures,
            "limit": limit_s,
            "share_of_limit": share,
            "times_floor": multiple,
            **(self.derived(limits) if self.derived is not None else {}),
        }


@dataclass(frozen=True)
class Result:
    """A benchmark's rows, what it sums up over them, and what makes the run a failed one, if anything does."""

    rows: Sequence[Row]
    summary: Callable[[Limits], Mapping[str, Any]] = lambda limits: {}
    failure: str | None = None


@dataclass(frozen=True)
class Column:
    """One column of the table for people: a figure's key, its header, and a format spec after scaling."""

    key: str
    header: str
    spec: str = ".2f"
    scale: float = 1.0


@dataclass(frozen=True)
class Bench:
    """One benchmark, as the registry lists it. `run` measures; `columns` are what a table shows of its rows."""

    name: str
    summary: str
    run: Callable[[Job], Result]
    columns: Sequence[Column]
    needs_model: bool = True
    against: Sequence[str] = ()
