"""In which order things happened."""

from __future__ import annotations

import random

from longctx.evals.tasks.task import Draft, Task
from longctx.evals.words import NAMES, scattered

VISITORS = 5


def draw(rng: random.Random, size: int) -> Draft:
    """Five visitors who come one after the other between `size` sentences of filler; the question names them mixed."""
    names = rng.sample(NAMES, VISITORS)
    lines = [f"Then {name} came to visit." for name in names]
    listed = sorted(names)
    return Draft(
        " ".join(scattered(rng, lines, size)),
        f"{', '.join(listed[:-1])} and {listed[-1]} came to visit. In which order? List the first one first.",
        " The visitors came in this order:",
        tuple(names),
        ordered=True,
    )


TASK = Task(
    "ordering",
    "the order in which five things happened",
    "Remember who came first and who came later in the following{} long text.",
    32,
    0,
    draw,
)
