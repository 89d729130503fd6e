"""Which variables hold a value that was handed on from one to the next (RULER's variable tracking)."""

from __future__ import annotations

import random
from itertools import pairwise

from longctx.evals.tasks.task import Draft, Task
from longctx.evals.words import scattered

HOPS = 4
CHAINS = 3


def draw(rng: random.Random, size: int) -> Draft:
    """Chains of assignments between `size` sentences of filler; the variables of one chain are asked for."""
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    names = list(dict.fromkeys("".join(rng.choices(letters, k=5)) for _ in range(4 * CHAINS * (HOPS + 1))))
    chains = [names[i * (HOPS + 1) : (i + 1) * (HOPS + 1)] for i in range(CHAINS)]
    values = rng.sample(range(10_000, 100_000), CHAINS)
    queues = [
        [f"Variable {chain[0]} is {value}.", *(f"Variable {b} is the same as {a}." for a, b in pairwise(chain))]
        for chain, value in zip(chains, values, strict=True)
    ]
    # A variable is said before the one that copies it; the chains are mixed.
    order = [i for i, queue in enumerate(queues) for _ in queue]
    rng.shuffle(order)
    lines = [queues[i].pop(0) for i in order]
    asked = rng.randrange(CHAINS)
    return Draft(
        " ".join(scattered(rng, lines, size)),
        f"Which {HOPS + 1} variables have the value {values[asked]}?",
        f" The {HOPS + 1} variables with the value {values[asked]} are",
        tuple(chains[asked]),
    )


TASK = Task(
    "variable-tracking",
    "the variables that hold one value, handed on from one to the next",
    "Remember which variable has which value in the following{} long text.",
    48,
    0,
    draw,
)
