"""Curves over lengths: seconds as a polynomial of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fit_curve(tokens: Sequence[int], seconds: Sequence[float], degree: int) -> dict[str, float] | None:
    """seconds = a + b n (+ c n^2), least squares of relative errors; None with fewer lengths than coefficients.

    With exactly as many lengths the fit goes through every point, and `worst_error` (relative) says nothing.
    """
    if len(tokens) <= degree:
        return None
    n, s = np.asarray(tokens, float), np.asarray(seconds, float)
    # In units of the longest length, so that the columns are of one size.
    unit = n.max()
    columns = np.stack([(n / unit) ** power for power in range(degree + 1)], axis=1) / s[:, None]
    solution, *_ = np.linalg.lstsq(columns, np.ones(len(s)), rcond=None)
    errors = columns @ solution - 1
    named = dict(zip("abc", (solution / unit ** np.arange(degree + 1)).tolist(), strict=False))
    return {**named, "worst_error": float(np.abs(errors).max())}
