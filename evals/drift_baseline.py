"""What the exact run computed of a text, kept in a file without a name, and how far another run is from it."""

# Legend: P kept positions, A probed positions, V vocabulary, L layers, H heads, D head dim, n tokens.
from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

import numpy as np

from longctx import LLM
from longctx.errors import LongctxError
from longctx.evals.drift_text import Text, read_text, vocab_of
from longctx.evals.reference import Reference
from longctx.units import format_bytes

_BEST = 20
"""Of each position so many of the likeliest tokens are compared with Hugging Face's logprobs."""


@dataclass(frozen=True)
class Distance:
    """Another run beside the baseline: `kl` [P] nats, KL(baseline || it); whether the likeliest token is the same [P];
    the text's logprobs under it [n - 1]; the relative error of each layer's attention output [L]."""

    kl: np.ndarray
    same_top: np.ndarray
    logprobs: np.ndarray
    layer_errors: np.ndarray


@dataclass(frozen=True)
class ControlDistance:
    """Hugging Face beside the baseline: `kl` [P], the same likeliest token [P], the largest difference of a logprob."""

    kl: np.ndarray
    same_top: np.ndarray
    max_logprob_difference: float


class Baseline:
    """Owns the kept logits [P, V] of one text (a file that is gone with its owner) and the probed attention outputs."""

    def __init__(self, llm: LLM, text: Text):
        self.text = text
        self._logits_PV = _map_file((len(text.kept), vocab_of(llm)))
        self._attention: dict[int, np.ndarray] = {}
        self.logprobs = read_text(llm, text, self._keep_row, self._keep_layer)

    def distance(self, llm: LLM) -> Distance:
        """Read the same text with another engine. Raises `EngineError` where its logits are no numbers."""
        num = len(self.text.kept)
        kl, same = np.full(num, np.nan), np.zeros(num, dtype=bool)
        wrong, whole = np.zeros(len(self._attention)), np.zeros(len(self._attention))

        def on_row(index: int, row_V: np.ndarray) -> None:
            exact_V = self._logits_PV[index]
            kl[index] = divergence(exact_V, row_V)
            same[index] = exact_V.argmax() == row_V.argmax()

        def on_layer(layer: int, index: np.ndarray, out: np.ndarray) -> None:
            exact = self._attention[layer][index].astype(np.float64)
            wrong[layer] += np.square(out - exact).sum()
            whole[layer] += np.square(exact).sum()

        logprobs = read_text(llm, self.text, on_row, on_layer)
        assert not np.isnan(kl).any(), "a kept position was not computed"
        return Distance(kl, same, logprobs, np.sqrt(wrong / np.maximum(whole, np.finfo(np.float64).tiny)))

    def control(self, reference: Reference) -> ControlDistance:
        """The same text through Hugging Face."""
        num = len(self.text.kept)
        kl, same, worst = np.full(num, np.nan), np.zeros(num, dtype=bool), 0.0
        for index, row_V in enumerate(reference.rows(self.text.ids, self.text.kept)):
            ours_V = self._logits_PV[index]
            kl[index], same[index] = divergence(row_V, ours_V), ours_V.argmax() == row_V.argmax()
            best = np.argpartition(row_V, -_BEST)[-_BEST:] if len(row_V) > _BEST else slice(None)
            worst = max(worst, float(np.abs(log_softmax(row_V)[best] - log_softmax(ours_V)[best]).max()))
        return ControlDistance(kl, same, worst)

    def _keep_row(self, index: int, row_V: np.ndarray) -> None:
        self._logits_PV[index] = row_V

    def _keep_layer(self, layer: int, index: np.ndarray, out: np.ndarray) -> None:
        shape = (len(self.text.probed), out.shape[1])
        self._attention.setdefault(layer, np.full(shape, np.nan, np.float32))[index] = out


def _map_file(shape: tuple[int, int]) -> np.ndarray:
    """fp32 zeros in a file without a name; its space is taken at once, since a full disk later would be a crash."""
    num_bytes = 4 * shape[0] * shape[1]
    try:
        with tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return np.memmap(file, dtype=np.float32, mode="r+", shape=shape)
    except OSError as error:
        raise LongctxError(
            f"the exact run's logits need {format_bytes(num_bytes)} in {tempfile.gettempdir()} ({error.strerror}): "
            "free some, or set TMPDIR to another disk"
        ) from error


def log_softmax(row_V: np.ndarray) -> np.ndarray:
    """Logprobs [V] in float64."""
    x_V = row_V.astype(np.float64)
    x_V -= x_V.max()
    shifted: np.ndarray = x_V - np.log(np.exp(x_V).sum())
    return shifted


def divergence(p_V: np.ndarray, q_V: np.ndarray) -> float:
    """KL(p || q) in nats of two rows of logits; 0 for equal ones, never below."""
    log_p, log_q = log_softmax(p_V), log_softmax(q_V)
    return max(0.0, float((np.exp(log_p) * (log_p - log_q)).sum()))
