"""The most frequent words of a text whose word counts follow a power law (RULER's frequent words extraction)."""

from __future__ import annotations

import random

from longctx.evals.tasks.task import Draft, Task
from longctx.evals.words import coined_words

ASKED = 3
_EXPONENT = 1.2
_KINDS = 40


def draw(rng: random.Random, size: int) -> Draft:
    """About `size` coined words; the n-th commonest stands about 1 / n ** 1.2 times as often as the first."""
    words = coined_words(rng, _KINDS)
    weights = [1 / (rank + 1) ** _EXPONENT for rank in range(_KINDS)]
    counts = [int(size * weight / sum(weights)) for weight in weights]
    # The three asked for are apart from each other and from the others, however short the text.
    for rank in range(ASKED - 1, -1, -1):
        counts[rank] = max(counts[rank], counts[rank + 1] + 2)
    text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    rng.shuffle(text)
    return Draft(
        " ".join(text),
        f"Which {ASKED} words are the most frequent ones of the text?",
        f" The {ASKED} most frequent words of the text are",
        tuple(words[:ASKED]),
    )


TASK = Task(
    "frequent-words",
    "the three most frequent words of a coined text",
    "Remember the most frequent words of the following{} long text in an unknown language.",
    32,
    24,
    draw,
)
