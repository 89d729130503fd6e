"""How often something happened."""

from __future__ import annotations

import random

from longctx.evals.tasks.task import Draft, Task
from longctx.evals.words import scattered

MOST = 12


def draw(rng: random.Random, size: int) -> Draft:
    """A bell that rings a few times, and a horn some other times, between `size` sentences of filler."""
    times, others = rng.sample(range(2, MOST + 1), 2)
    events = ["The bell rang."] * times + ["The horn sounded."] * others
    rng.shuffle(events)
    return Draft(
        " ".join(scattered(rng, events, size)),
        "How many times did the bell ring? Answer with a number in digits.",
        " The number of times that the bell rang is",
        (str(times),),
        quoted=False,
    )


TASK = Task(
    "counting",
    "how many times something happened",
    "Count how many times the bell rang in the following{} long text.",
    24,
    0,
    draw,
)
