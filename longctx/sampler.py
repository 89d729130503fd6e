"""Turns a row of logits into a token: greedy or drawn, the draw depending on seed and position and nothing else.

Legend: R rows, V vocabulary (rows of the LM head), N ids that may be sampled (`vocab_limit` or fewer).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from longctx.errors import EngineError
from longctx.params import SamplingParams
from longctx.penalties import History, adjusted
from longctx.step import StepRow

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them overflows, and the best token has all the mass anyway."""

_SMALL_K = 1000  # up to here torch's topk beats numpy's partition
_BLOCK = 512  # weights whose sum stands for them while a draw's place is looked for
_PHILOX_STREAM = 0x6C6F6E67637478  # sets these draws apart from any other use of the same seed


class SamplingError(EngineError):
    """A row's logits hold NaN or +inf, or nothing that may be sampled: that request fails, its batch mates do not."""


def sample(
    logits_V: torch.Tensor,
    params: SamplingParams,
    seed: int,
    position: int,
    vocab_limit: int,
    history: History | None = None,
) -> int:
    """One token id below `vocab_limit` from logits [V] of any float dtype and device, which stay as they are.

    `position` is the sampled token's absolute position, `history` what was there before, for penalties. The draw is a
    pure function of (seed, position), so neither batch mates nor a preemption change it. Order: penalties and bias,
    top-k, temperature, top-p, min-p. Ties are broken towards the lowest id, in greedy choice and at the border of top-k
    and top-p. Raises `SamplingError` where no token can be chosen honestly (NaN, +inf, nothing but -inf).
    """
    # One row, as a view where the logits are fp32 on the CPU already.
    x_N = logits_V.detach()[:vocab_limit].to("cpu", torch.float32).numpy()
    if params.penalizes or params.logit_bias:
        x_N = adjusted(x_N, params, history)
    best = float(x_N.max()) if len(x_N) else -np.inf  # NaN propagates through max
    if not np.isfinite(best):
        raise SamplingError(
            f"the logits for position {position} have maximum {best} over {len(x_N)} tokens: no token can be sampled"
        )
    if params.temperature < GREEDY_BELOW:
        return int(x_N.argmax())  # numpy's argmax is the first of equals

    ids = None  # None: all of them
    if 0 < params.top_k < len(x_N):
        ids = _largest(x_N, params.top_k, _kth_largest(x_N, params.top_k))
        x_N = x_N[ids]
    weight_N = x_N - np.float32(best)  # the one copy of the row; the largest weight is exactly 1
    with np.errstate(over="ignore", under="ignore"):
        weight_N /= np.float32(params.temperature)
        np.exp(weight_N, out=weight_N)
    if params.top_p < 1.0:
        kept = _nucleus(weight_N, params.top_p)
        ids = kept if ids is None else ids[kept]
        weight_N = weight_N[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weight_N >= np.float32(params.min_p))  # the best one's weight is 1
        ids = kept if ids is None else ids[kept]
        weight_N = weight_N[kept]
    index = _inverse_cdf(weight_N, _uniform(seed, position))
    return index if ids is None else int(ids[index])


def sample_rows(logits_RV: torch.Tensor, rows: Sequence[StepRow], vocab_limit: int) -> list[int | SamplingError]:
    """One token per row of logits [R, V], in order; `rows` are the step's rows that sample, also in order.

    A row that cannot be sampled yields its `SamplingError` in place of a token instead of failing the others.
    """
    assert logits_RV.shape[0] == len(rows), "one row of logits for each row that samples"
    tokens: list[int | SamplingError] = []
    for logits_V, row in zip(logits_RV, rows, strict=True):
        try:
            tokens.append(sample(logits_V, row.params, row.seed, row.start + row.n, vocab_limit, row.history))
        except SamplingError as error:
            tokens.append(error)
    return tokens


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, by a counter-based generator (Philox 4x64, Salmon et al. 2011)."""
    bits = np.random.Philox(key=np.array([seed, _PHILOX_STREAM], np.uint64), counter=position).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def _kth_largest(x_N: np.ndarray, k: int) -> float:
    if k <= _SMALL_K:
        return float(torch.from_numpy(x_N).topk(k).values[-1])
    return float(np.partition(x_N, len(x_N) - k)[len(x_N) - k])


def _largest(x_N: np.ndarray, k: int, kth: float) -> np.ndarray:
    """Ascending indices of the k largest values, given the k-th largest; of its equals the lowest are taken."""
    indices = np.flatnonzero(x_N >= kth)
    surplus = len(indices) - k
    if surplus == 0:
        return indices
    ties = np.flatnonzero(x_N[indices] == kth)
    return np.delete(indices, ties[-surplus:])


def _nucleus(weight_N: np.ndarray, top_p: float) -> np.ndarray:
    """Ascending indices of the smallest set of largest weights that holds `top_p` of the mass; never empty.

    Nucleus sampling, Holtzman et al. 2020, section 3.1. Instead of a sort (7 ms for 262,144 weights) the mass is
    summed by bucket: positive floats order like their bit patterns, so the upper 16 bits make buckets of 0.8 % width.
    Only the bucket where the tail ends is sorted.
    """
    bucket_N = weight_N.view(np.int32) >> 16
    mass = np.cumsum(np.bincount(bucket_N, weights=weight_N))
    tail = (1.0 - top_p) * mass[-1]
    border = min(int(np.searchsorted(mass, tail, side="right")), len(mass) - 1)
    inside = np.sort(weight_N[bucket_N == border])
    below = mass[border - 1] if border else 0.0
    drop = int(np.searchsorted(below + np.cumsum(inside, dtype=np.float64), tail, side="right"))
    drop = min(drop, len(inside) - 1)  # the sums of a bucket in two orders may differ in the last bit
    kept = int(np.count_nonzero(bucket_N > border)) + len(inside) - drop
    return _largest(weight_N, kept, inside[drop])


def _inverse_cdf(weight_N: np.ndarray, u: float) -> int:
    """The index whose share of the cumulative weights holds `u`; never one of weight zero.

    The order is by id, not by probability: so a rounding difference between two near equals cannot swap their places.
    Blocks are summed first and one of them is looked through: a running sum of 262,144 weights takes 2 ms.
    """
    whole = len(weight_N) // _BLOCK * _BLOCK
    sums = weight_N[:whole].reshape(-1, _BLOCK).sum(1, dtype=np.float64)
    mass = np.cumsum(np.append(sums, weight_N[whole:].sum(dtype=np.float64)))
    target = u * mass[-1]
    block = _first_above(mass, target)
    start = block * _BLOCK
    inner = np.cumsum(weight_N[start : start + _BLOCK], dtype=np.float64)
    return start + _first_above(inner, target - (mass[block - 1] if block else 0.0))


def _first_above(mass: np.ndarray, target: float) -> int:
    """The first place where a running sum exceeds `target`, at most the last where it grew."""
    last = np.searchsorted(mass, mass[-1], side="left")
    return int(min(np.searchsorted(mass, target, side="right"), last))
