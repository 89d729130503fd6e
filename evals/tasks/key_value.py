"""One value among very many pairs."""

from __future__ import annotations

import random

from longctx.evals.tasks.task import Draft, Task


def draw(rng: random.Random, size: int) -> Draft:
    """`size` pairs of six-digit keys and five-digit values, one of which is asked for."""
    asked = rng.random()
    keys: dict[int, int] = {}
    values: set[int] = set()
    while len(keys) < size:
        key, value = rng.randrange(100_000, 1_000_000), rng.randrange(10_000, 100_000)
        # Each value once, as long as there are enough of them.
        if key not in keys and (value not in values or size > 50_000):
            keys[key] = value
            values.add(value)
    key = list(keys)[int(asked * size)]
    return Draft(
        "\n".join(f"{key}: {value}" for key, value in keys.items()),
        f"What is the value of the key {key}?",
        f" The value of the key {key} is",
        (str(keys[key]),),
    )


TASK = Task(
    "key-value",
    "one value among as many pairs as fit",
    "Remember the following{} long list of keys and values.",
    24,
    1,
    draw,
)
