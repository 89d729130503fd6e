"""Log-probabilities of tokens under the model itself, and the best tokens of a row: one row at a time, any size."""

# Legend: T rows, V vocabulary (rows of the LM head), N ids that may be sampled, K best ones.
from __future__ import annotations

import numpy as np
import torch

from longctx.events import TokenLogprobs
from longctx.step import LogprobRows

_GROUPS = 1024
"""Ids are divided into so many groups, each as good as its best one while the best of a row are looked for."""


def logprob_rows(logits_TV: torch.Tensor, targets: np.ndarray, num_top: int, vocab_limit: int) -> LogprobRows:
    """Logprobs of `targets` [T] under logits [T, V], and of the `num_top` best ids below `vocab_limit` of each row.

    Ids from `vocab_limit` on have no part in the sum, and probability zero. A row whose maximum is NaN or infinite
    gives NaN. One row is copied at a time, and its result depends on nothing but itself.
    """
    num_top = min(num_top, vocab_limit)
    rows = LogprobRows(
        np.empty(len(targets), np.float32),
        np.empty((len(targets), num_top), np.int32),
        np.empty((len(targets), num_top), np.float32),
    )
    for i, (logits_V, target) in enumerate(zip(logits_TV, targets.tolist(), strict=True)):
        x_N = logits_V.detach()[:vocab_limit].to("cpu", torch.float32).numpy()
        total = _log_sum_exp(x_N)
        rows.logprobs[i] = float(x_N[target]) - total if target < len(x_N) else total - np.inf
        if num_top and np.isfinite(total):
            rows.top_ids[i] = best_ids(x_N, num_top)
            rows.top_logprobs[i] = x_N[rows.top_ids[i]] - total
    return rows


def token_logprobs(logits_V: torch.Tensor, token_id: int, num_top: int, vocab_limit: int) -> TokenLogprobs:
    """The same of a single row and token, as a request's owner gets it."""
    row = logprob_rows(logits_V[None], np.array([token_id]), num_top, vocab_limit)
    return TokenLogprobs(float(row.logprobs[0]), tuple(row.top_ids[0].tolist()), tuple(row.top_logprobs[0].tolist()))


def best_ids(x_N: np.ndarray, k: int) -> np.ndarray:
    """The ids of the k largest values, falling; equals by rising id. No value may be NaN.

    At least k values reach the k-th largest of the groups' maxima, so only those that do are sorted (a fifth of the
    time of torch's topk for 262,144 values, whose order of equals is not defined either).
    """
    per_group = len(x_N) // _GROUPS
    if per_group < 2 or k > _GROUPS:
        candidates = np.arange(len(x_N))
    else:
        maxima = x_N[: per_group * _GROUPS].reshape(per_group, _GROUPS).max(0)
        candidates = np.flatnonzero(x_N >= np.partition(maxima, _GROUPS - k)[_GROUPS - k])
    # Stable: of equals the lower id comes first.
    return candidates[np.argsort(-x_N[candidates], kind="stable")[:k]]


def _log_sum_exp(x_N: np.ndarray) -> float:
    best = x_N.max() if len(x_N) else np.float32(-np.inf)
    if not np.isfinite(best):
        return float("nan")
    weight_N = x_N - best
    np.exp(weight_N, out=weight_N)
    return float(best) + float(np.log(weight_N.sum(dtype=np.float64)))
