"""What a task is: material of any size, a question about it, and the facts that its answer must have."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Draft:
    """One drawn problem. `stem` begins the answer for a model that continues text instead of answering.

    `ordered`: the facts must come in this order. `quoted`: each fact stands in the material as it is.
    """

    material: str
    question: str
    stem: str
    facts: tuple[str, ...]
    ordered: bool = False
    quoted: bool = True


@dataclass(frozen=True)
class Task:
    """A kind of problem. `draw(random, size)` makes one with `size` units of material, `least` or more of them.

    The same random gives the same problem; a larger size never gives a shorter one. `intro` is its first line.
    """

    name: str
    summary: str
    intro: str
    answer_tokens: int
    least: int
    draw: Callable[[random.Random, int], Draft]
