"""An answer that three facts in different places give only together."""

from __future__ import annotations

import random

from longctx.evals.tasks.task import Draft, Task
from longctx.evals.words import CITIES, NAMES, NOUNS, scattered

CHAINS = 3


def draw(rng: random.Random, size: int) -> Draft:
    """Who owns which shop, in which street it is, in which city that is: three chains, their facts in any order."""
    owners, cities = rng.sample(NAMES, CHAINS), rng.sample(CITIES, CHAINS)
    nouns = rng.sample(NOUNS, 2 * CHAINS)
    shops = [f"{noun} shop" for noun in nouns[:CHAINS]]
    streets = [f"{noun.capitalize()} Street" for noun in nouns[CHAINS:]]
    facts = [
        fact
        for owner, shop, street, city in zip(owners, shops, streets, cities, strict=True)
        for fact in (f"{owner} owns the {shop}.", f"The {shop} is in {street}.", f"{street} is in the city of {city}.")
    ]
    rng.shuffle(facts)
    asked = rng.randrange(CHAINS)
    return Draft(
        " ".join(scattered(rng, facts, size)),
        f"In which city is the shop that {owners[asked]} owns?",
        f" The shop that {owners[asked]} owns is in the city of",
        (cities[asked],),
    )


TASK = Task(
    "multi-hop",
    "an answer that three facts give only together",
    "Remember the people, shops and streets in the following{} long text.",
    24,
    0,
    draw,
)
