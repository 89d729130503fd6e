"""Who has the most in all, over many small entries."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from longctx.evals.tasks.task import Draft, Task
from longctx.evals.words import COUNTABLE, NAMES

SELLERS = 5
_MARGIN = 1.4
"""The winner has so many times what the next one has."""


def draw(rng: random.Random, size: int) -> Draft:
    """`size` sales by five people; who sold the most in all is seldom who sold most often."""
    names = rng.sample(NAMES, SELLERS)
    things = rng.sample(COUNTABLE, 8)
    # The winner sells seldom and much, the busiest one often and little.
    sales: list[Any] = []
    for number in range(size):
        who = rng.choices(range(SELLERS), (3, 5, 3, 3, 3))[0] if number >= SELLERS else number
        sales.append([who, rng.randrange(11, 20) if who == 0 else rng.randrange(2, 7), rng.choice(things)])
    rest = max(_totals(sales)[1:])
    for sale in sales:
        if _totals(sales)[0] >= _MARGIN * rest:
            break
        if sale[0] == 0:
            sale[1] += max(1, int(_MARGIN * rest) + 1 - _totals(sales)[0])
    lines = [f"{names[who]} sold {count} {thing}s." for who, count, thing in sales]
    rng.shuffle(lines)
    return Draft(
        " ".join(lines),
        "Who sold the largest number of things in all?",
        " The person who sold the largest number of things in all is",
        (names[0],),
    )


def _totals(sales: Sequence[Any]) -> list[int]:
    return [sum(count for who, count, _ in sales if who == seller) for seller in range(SELLERS)]


TASK = Task(
    "aggregation",
    "who has the most in all, over many entries",
    "Add up what each person sold in the following{} long list.",
    24,
    SELLERS,
    draw,
)
