"""Small per-token operations of a decoder as numba loops: one thread, one pass, each row by itself."""

# Shape legend: N rows, D length of a row or head, E all heads of a token side by side, R rotated dimensions.
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


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def norm_and_rotate_heads(
    x_NE: np.ndarray,
    num_heads: tuple[int, int],
    head_dim: int,
    scales: tuple[np.ndarray, np.ndarray],
    eps: float,
    cos_NR: np.ndarray,
    sin_NR: np.ndarray,
) -> None:
    """In place on the query and then the key heads at the front of each row: RMS norm, then rotation of halves.

    `num_heads` and `scales` [D] are those of queries and keys; an empty scale leaves the norm out, tables of width 0
    the rotation. Tables narrower than a head rotate its first R dimensions (Su et al. 2021, in the half-split layout).
    """
    half = cos_NR.shape[1] // 2
    for i in range(x_NE.shape[0]):
        first = 0
        for part in range(2):
            scale_D = scales[part]
            for _ in range(num_heads[part]):
                head = x_NE[i, first : first + head_dim]
                if scale_D.shape[0] > 0:
                    total = np.float32(0.0)
                    for j in range(head_dim):
                        total += head[j] * head[j]
                    factor = np.float32(1.0) / np.sqrt(total / np.float32(head_dim) + np.float32(eps))
                    for j in range(head_dim):
                        head[j] = head[j] * factor * scale_D[j]
                for j in range(half):
                    left, right = head[j], head[j + half]
                    head[j] = left * cos_NR[i, j] - right * sin_NR[i, j]
                    head[j + half] = right * cos_NR[i, j + half] + left * sin_NR[i, j + half]
                first += head_dim
