"""How a request wants its tokens chosen and when to stop."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from longctx.errors import RequestError

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096

MAX_LOGPROBS = 20
"""The most alternatives per token that `logprobs` and `prompt_logprobs` give."""

MAX_BIASED_TOKENS = 16_384

_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of one request.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `max_tokens` None means up to the model's
    limit. `seed` None draws a fresh one, which the request then reports. `stop` strings end the text before themselves.

    `min_p` drops tokens less probable than this share of the best one's probability (Nguyen et al. 2024).
    `repetition_penalty` (Keskar et al. 2019; 1 is off) divides positive logits of every token of prompt and output and
    multiplies negative ones. `presence_penalty` is subtracted once from each token of the output, `frequency_penalty`
    once for each time it occurs there; the prompt does not count (OpenAI's rule). `logit_bias` is added to the logits
    of the tokens it names; a mapping of token ids is taken and kept as pairs in order of the ids.

    `logprobs` n reports each generated token's logprob and those of the n best, `prompt_logprobs` the same of the
    prompt's tokens; 0 reports the token's own only, None none. They are the model's own: before penalties, bias and
    temperature. With `prompt_logprobs` nothing of the prompt is taken from the prefix cache.

    Numbers of other libraries are taken; raises `RequestError` for a value of another kind or out of range.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        # The engine's thread computes with these: a value of the wrong kind must not get that far.
        for name in ("max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"):
            self._convert(name, _whole, "a whole number")
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            self._convert(name, _real, "a number")
        stop = self.stop
        self._convert("stop", lambda _: (stop,) if isinstance(stop, str) else tuple(stop), "a string or several")
        self._convert("logit_bias", _bias_pairs, "a mapping from token ids to numbers")
        for ok, message in (*self._checks(), *self._list_checks()):
            if not ok:
                raise RequestError(message)

    @property
    def penalizes(self) -> bool:
        """Whether tokens that came before change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @functools.cached_property
    def bias_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """`logit_bias` as ids [D] int64 and biases [D] fp32, both made once."""
        ids = np.array([token for token, _ in self.logit_bias], np.int64)
        return ids, np.array([bias for _, bias in self.logit_bias], np.float32)

    def _checks(self) -> tuple[tuple[bool, str], ...]:
        return (
            (self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
            (0.0 <= self.temperature <= 100.0, f"temperature must be between 0 and 100, got {self.temperature}"),
            (self.top_k >= 0, f"top_k must be 0 (off) or more, got {self.top_k}"),
            (0.0 < self.top_p <= 1.0, f"top_p must be above 0 and at most 1, got {self.top_p}"),
            (0.0 <= self.min_p <= 1.0, f"min_p must be between 0 (off) and 1, got {self.min_p}"),
            (
                0.01 <= self.repetition_penalty <= 100.0,
                f"repetition_penalty must be between 0.01 and 100 (1 is off), got {self.repetition_penalty}",
            ),
            *(
                (-2.0 <= getattr(self, name) <= 2.0, f"{name} must be between -2 and 2, got {getattr(self, name)}")
                for name in ("presence_penalty", "frequency_penalty")
            ),
            (self.seed is None or 0 <= self.seed < 2**64, f"seed must be between 0 and 2**64 - 1, got {self.seed}"),
            *(
                (
                    getattr(self, name) is None or 0 <= getattr(self, name) <= MAX_LOGPROBS,
                    f"{name} must be between 0 and {MAX_LOGPROBS}, got {getattr(self, name)}",
                )
                for name in ("logprobs", "prompt_logprobs")
            ),
        )

    def _list_checks(self) -> tuple[tuple[bool, str], ...]:
        bad_bias = next((pair for pair in self.logit_bias if not -100.0 <= pair[1] <= 100.0), None)
        return (
            (len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}"),
            (
                all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in self.stop),
                f"each stop string must have 1 to {MAX_STOP_CHARS} characters",
            ),
            (
                len(self.logit_bias) <= MAX_BIASED_TOKENS,
                f"logit_bias can name at most {MAX_BIASED_TOKENS} tokens, got {len(self.logit_bias)}",
            ),
            (bad_bias is None, f"logit_bias must lie between -100 and 100, got {bad_bias and bad_bias[1]}"),
            (
                not self.logit_bias or self.logit_bias[0][0] >= 0,
                f"logit_bias names token id {self.logit_bias and self.logit_bias[0][0]}: ids are 0 or more",
            ),
        )

    def _convert(self, name: str, convert: Callable[[Any], Any], kind: str) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        try:
            object.__setattr__(self, name, convert(value))
        except (TypeError, ValueError, OverflowError) as error:
            got = repr(value)
            raise RequestError(f"{name} must be {kind}, got {got if len(got) <= 100 else got[:97] + '...'}") from error


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("true and false are no numbers")
    return operator.index(value)


def _real(value: Any) -> float:
    if isinstance(value, str | bytes | bool):
        raise TypeError("text, true and false are no numbers")
    return float(value)


def _bias_pairs(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple(sorted({_whole(token): _real(bias) for token, bias in pairs}.items()))
