"""Whether misses have a sharp edge at some distance from the end: a window or a length set wrong, not a weak model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NEAR_SCORE, FAR_SCORE = 0.8, 0.2
_MIN_NEAR, _MIN_FAR = 2, 3


@dataclass(frozen=True)
class Place:
    """One cell: how long its prompt was, how many tokens its needle stands before the end, and its score."""

    length: int
    distance: int
    score: float


@dataclass(frozen=True)
class Edge:
    """Needles up to `near` tokens before the end are found, those from `far` on are not."""

    near: int
    far: int
    sizes: tuple[str, ...]

    def __str__(self) -> str:
        cause = f"; {' and '.join(self.sizes)} lies there" if self.sizes else ""
        return (
            f"configuration suspect: needles up to {self.near:,} tokens before the end are found, those {self.far:,} "
            f"and more before it are not, whatever the length{cause}. Check window, positions and rope scaling"
        )


def find_edge(places: Sequence[Place], sizes: Mapping[str, int]) -> Edge | None:
    """The sharpest edge by distance from the end, if there is one and a known size lies there.

    `sizes` are the lengths that could explain it; where none is known, any sharp edge is told. Only prompts that reach
    across it count, and each of them must show it: that long prompts are harder than short ones is no edge.
    """
    best: tuple[float, Edge] | None = None
    for far in sorted({place.distance for place in places}):
        lengths = {p.length for p in places if p.distance >= far} & {p.length for p in places if p.distance < far}
        near_places = [p for p in places if p.length in lengths and p.distance < far]
        far_places = [p for p in places if p.length in lengths and p.distance >= far]
        if len(near_places) < _MIN_NEAR or len(far_places) < _MIN_FAR:
            continue
        near_score = min(_mean(near_places, length) for length in lengths)
        far_score = max(_mean(far_places, length) for length in lengths)
        if near_score >= NEAR_SCORE and far_score <= FAR_SCORE:
            near = max(p.distance for p in near_places if p.score >= NEAR_SCORE)
            names = tuple(f"{name} ({n:,})" for name, n in sizes.items() if near * 0.9 <= n <= far * 1.1)
            if (names or not sizes) and (best is None or near_score - far_score > best[0]):
                best = near_score - far_score, Edge(near, far, names)
    return None if best is None else best[1]


def _mean(places: Sequence[Place], length: int) -> float:
    return statistics.fmean(place.score for place in places if place.length == length)
