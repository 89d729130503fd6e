"""A question about one of many people, each with a paragraph alike."""

from __future__ import annotations

import random

from longctx.evals.tasks.task import Draft, Task
from longctx.evals.words import CITIES, COUNTABLE, NAMES

_TRADES = ("baker", "carpenter", "doctor", "gardener", "lawyer", "painter", "pilot", "printer", "sailor", "teacher")
_QUESTIONS = (
    ("In which city was {name} born?", " {name} was born in the city of", "city"),
    ("In which year was {name} born?", " {name} was born in the year", "year"),
    ("What does {name} collect?", " {name} collects", "hobby"),
)


def draw(rng: random.Random, size: int) -> Draft:
    """`size` paragraphs, one per person; names are pairs, so that each half of one is shared by others."""
    order, pick, question = rng.random(), rng.random(), rng.randrange(len(_QUESTIONS))
    pairs = [(first, last) for first in NAMES for last in NAMES if first != last]
    random.Random(order).shuffle(pairs)
    people = []
    for number in range(size):
        first, last = pairs[number % len(pairs)]
        name = f"{first} {last}" if number < len(pairs) else f"{first} {last} the {number // len(pairs) + 1}th"
        traits = {
            "city": rng.choice(CITIES),
            "year": str(rng.randrange(1800, 2000)),
            "hobby": f"{rng.choice(COUNTABLE)}s",
        }
        people.append((name, rng.choice(_TRADES), traits))
    asked, _, traits = people[int(pick * size)]
    text, stem, kind = _QUESTIONS[question]
    paragraphs = [
        f"Document {number}. {name} was born in {t['city']} in {t['year']}, became a {trade} and collects {t['hobby']}."
        for number, (name, trade, t) in enumerate(people, 1)
    ]
    return Draft("\n".join(paragraphs), text.format(name=asked), stem.format(name=asked), (traits[kind],))


TASK = Task(
    "qa-distractors",
    "a question about one of many people, each described alike",
    "Remember the people in the following{} long collection of documents.",
    24,
    2,
    draw,
)
