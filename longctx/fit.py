"""A small non-negative cost model fitted online: from a first guess to what this machine does, without jumps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FORGET = 0.96
"""Weight of the past after one more observation like it: about the last twenty-five count."""

PRIOR_WEIGHT = 0.05
"""Weight of the first guess beside one observation of weight 1: it decides only what was never observed."""

TOO_FAST = 0.5
"""Below this share of the predicted time an observation loses weight, once the fit is warm."""

WARM = 4
MIN_SPREAD, FIRST_SPREAD = 0.05, 0.4


@dataclass
class OnlineFit:
    """seconds = coefficients . features, all non-negative, fitted to relative errors with exponential forgetting.

    The error of an observation is predicted / measured - 1, which no measurement, however slow, drives beyond 1: a page
    fault or a first compilation hardly moves the fit, and needs no clipping that would also hide a real change.

    Only what an observation speaks of is forgotten for it: a thousand small steps do not make it forget what large
    ones cost, or they would look dearer and dearer and never be tried again. (Directional forgetting: Cao and
    Schwartz, "A directional forgetting algorithm based on the decomposition of the information matrix", 2000.)

    `guess` are the coefficients before any observation, all positive. While few directions were observed the guess is
    scaled as a whole, so that one measured step already corrects all coefficients.
    """

    guess: tuple[float, ...]
    count: int = 0
    log_ratio: float = 0.0
    spread: float = FIRST_SPREAD
    gram: np.ndarray = field(default=None)  # type: ignore[arg-type]
    moment: np.ndarray = field(default=None)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        assert all(x > 0 and math.isfinite(x) for x in self.guess)
        size = len(self.guess)
        self.gram = np.zeros((size, size)) if self.gram is None else self.gram
        self.moment = np.zeros(size) if self.moment is None else self.moment
        self._coefficients: np.ndarray | None = None

    @property
    def coefficients(self) -> np.ndarray:
        """[F] fp64, in seconds per unit of each feature."""
        if self._coefficients is None:
            scale = math.exp(self.log_ratio)
            # In units of the scaled guess, so that wild measurements cannot make the system singular.
            gram = scale**2 * self.gram
            prior = PRIOR_WEIGHT + 1e-9 * float(np.trace(gram))
            relative = _non_negative(gram + prior * np.eye(len(gram)), scale * self.moment + prior)
            self._coefficients = relative * scale * np.asarray(self.guess)
        return self._coefficients

    def predict(self, features: Sequence[float]) -> float:
        return float(np.dot(self.coefficients, features))

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Add one measurement; ignored when it is not positive."""
        predicted = self.predict(features)
        if not (math.isfinite(seconds) and seconds > 0 and predicted > 0):
            return
        ratio = seconds / predicted
        weight = 1.0
        if self.count >= WARM:
            self.spread += 0.1 * (min(abs(ratio - 1), 1.0) - self.spread)
            weight = min(1.0, ratio / TOO_FAST) ** 4
        row = np.asarray(features) * np.asarray(self.guess) / seconds
        first = seconds / float(np.dot(self.guess, features))
        step = max(1 / (self.count + 1), 1 - FORGET)
        self.log_ratio += step * (math.log(first) - self.log_ratio)
        along = self.gram @ row
        if (known := float(row @ along)) > 0:
            self.moment = self.moment - (1 - FORGET) * float(row @ self.moment) / known * along
            self.gram = self.gram - (1 - FORGET) / known * np.outer(along, along)
        self.gram = self.gram + weight * np.outer(row, row)
        self.moment = self.moment + weight * row
        self.count += 1
        if self.count == WARM:
            self.spread = 2 * MIN_SPREAD
        self._coefficients = None

    @property
    def relative_error(self) -> float:
        """Typical relative error of a prediction, never below 5 %."""
        return max(self.spread, MIN_SPREAD)

    def to_json(self) -> dict[str, Any]:
        return {
            "guess": list(self.guess),
            "count": self.count,
            "log_ratio": self.log_ratio,
            "spread": self.spread,
            "gram": self.gram.tolist(),
            "moment": self.moment.tolist(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OnlineFit:
        """Raises `ValueError` or `KeyError` for anything that `to_json` could not have written."""
        guess = tuple(map(float, data["guess"]))
        size = len(guess)
        if not (np.isfinite(guess).all() and min(guess, default=0.0) > 0):
            raise ValueError(f"guess {guess}")
        fit = cls(
            guess,
            int(data["count"]),
            float(data["log_ratio"]),
            float(data["spread"]),
            np.array(data["gram"], dtype=float).reshape(size, size),
            np.array(data["moment"], dtype=float).reshape(size),
        )
        numbers = [fit.log_ratio, fit.spread, *fit.gram.ravel(), *fit.moment]
        if not np.isfinite(numbers).all():
            raise ValueError("not finite")
        return fit


def _non_negative(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Minimize x'Gx - 2m'x over x >= 0 for a small positive definite G, exactly: try every set of free variables."""
    best, best_value = np.zeros(len(moment)), 0.0
    for size in range(1, len(moment) + 1):
        for free in itertools.combinations(range(len(moment)), size):
            index = list(free)
            part = np.linalg.solve(gram[np.ix_(index, index)], moment[index])
            value = -float(moment[index] @ part)
            if (part >= 0).all() and value < best_value:
                best, best_value = np.zeros(len(moment)), value
                best[index] = part
    return best
