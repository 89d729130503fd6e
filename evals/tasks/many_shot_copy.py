"""Repeating one of many lines as it was."""

from __future__ import annotations

import random

from longctx.evals.tasks.task import Draft, Task
from longctx.evals.words import NOUNS

WORDS = 6


def draw(rng: random.Random, size: int) -> Draft:
    """`size` numbered lines of six nouns; some are repeated as examples of what is wanted, then one is asked for."""
    pick = rng.random()
    lines = [rng.sample(NOUNS, WORDS) for _ in range(size)]
    asked = int(pick * size)
    shown = [(asked + 1 + i) % size for i in range(3)]
    examples = "\n".join(f"Repeat line {i + 1}: {' '.join(lines[i])}" for i in shown)
    material = "\n".join(f"Line {i}: {' '.join(line)}" for i, line in enumerate(lines, 1))
    return Draft(
        f"{material}\n\n{examples}",
        f"Repeat line {asked + 1}:",
        "",
        tuple(lines[asked]),
        ordered=True,
    )


TASK = Task(
    "many-shot-copy",
    "one of many lines, repeated word by word",
    "Remember every line of the following{} long list.",
    32,
    4,
    draw,
)
