"""The words that stand most often in a long list (RULER's common words extraction)."""

from __future__ import annotations

import random

from longctx.evals.tasks.task import Draft, Task
from longctx.evals.words import NOUNS

COMMON = 5
_SHARE = 3
"""One word in so many is a common one."""


def draw(rng: random.Random, size: int) -> Draft:
    """A numbered list of `size` nouns: five of them again and again, the others at most a quarter as often."""
    often = max(4, size // (_SHARE * COMMON))
    rest = size - often * COMMON
    most = often // 4
    nouns = rng.sample(NOUNS, COMMON + -(-rest // most))
    nouns, others = nouns[:COMMON], nouns[COMMON:]
    words = nouns * often + (others * most)[:rest]
    rng.shuffle(words)
    return Draft(
        " ".join(f"{i}. {word}" for i, word in enumerate(words, 1)),
        f"Which {COMMON} words stand most often in the list?",
        f" The {COMMON} words that stand most often in the list are",
        tuple(nouns),
    )


TASK = Task(
    "common-words",
    "the five words that stand most often in a list",
    "Remember which words stand most often in the following{} long list.",
    40,
    4 * COMMON * _SHARE,
    draw,
)
