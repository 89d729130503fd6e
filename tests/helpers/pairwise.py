"""A small pairwise cover: every two values of any two factors meet in at least one case."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases covering all pairs of the factors' values, greedily and deterministically."""
    names = list(factors)
    left = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(factors[names[a]]))
        for y in range(len(factors[names[b]]))
    }
    cases = []
    while left:
        chosen: dict[int, int] = {}
        for (a, x), (b, y) in sorted(left):
            if chosen.get(a, x) == x and chosen.get(b, y) == y:
                chosen[a], chosen[b] = x, y
        for i in range(len(names)):
            chosen.setdefault(i, len(cases) % len(factors[names[i]]))
        left -= {((a, chosen[a]), (b, chosen[b])) for a, b in itertools.combinations(range(len(names)), 2)}
        cases.append({name: factors[name][chosen[i]] for i, name in enumerate(names)})
    return cases
