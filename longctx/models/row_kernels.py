"""Small per-token operations of a decoder as numba loops: one thread, one pass, each row by itself."""

# Shape legend: N rows, D row length.
from __future__ import annotations

import numpy as np
from numba import njit


# One thread is enough: a row is in the first-level cache for its second pass, and a pool of ours would fight the one of
# torch for the cores. Sums may be reassociated, always in the same way for a given D, so rows stay independent.
@njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def rms_norm_rows(x_ND: np.ndarray, scale_D: np.ndarray, eps: float, out_ND: np.ndarray) -> None:
    """out = x / sqrt(mean(x^2) + eps) * scale, row by row, all fp32 (Zhang and Sennrich 2019, section 3)."""
    num_rows, length = x_ND.shape
    for i in range(num_rows):
        total = np.float32(0.0)
        for j in range(length):
            total += x_ND[i, j] * x_ND[i, j]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(length) + np.float32(eps))
        for j in range(length):
            out_ND[i, j] = x_ND[i, j] * factor * scale_D[j]
