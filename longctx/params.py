"""How a request wants its tokens chosen and when to stop."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longctx.errors import RequestError

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of one request.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `max_tokens` None means up to the model's limit.
    `seed` None draws a fresh one, which the request then reports. `stop` strings end the text before themselves.
    Numbers of other libraries are taken; raises `RequestError` for a value of another kind or out of range.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # The engine's thread computes with these: a value of the wrong kind must not get that far.
        for name in ("max_tokens", "top_k", "seed"):
            self._convert(name, operator.index, "a whole number")
        for name in ("temperature", "top_p"):
            self._convert(name, _real, "a number")
        stop = self.stop
        self._convert("stop", lambda _: (stop,) if isinstance(stop, str) else tuple(stop), "a string or several")
        checks = (
            (self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
            (
                math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0,
                f"temperature must be between 0 and 100, got {self.temperature}",
            ),
            (self.top_k >= 0, f"top_k must be 0 (off) or more, got {self.top_k}"),
            (0.0 < self.top_p <= 1.0, f"top_p must be above 0 and at most 1, got {self.top_p}"),
            (self.seed is None or 0 <= self.seed < 2**64, f"seed must be between 0 and 2**64 - 1, got {self.seed}"),
            (len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}"),
            (
                all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in self.stop),
                f"each stop string must have 1 to {MAX_STOP_CHARS} characters",
            ),
        )
        for ok, message in checks:
            if not ok:
                raise RequestError(message)

    def _convert(self, name: str, convert: Callable[[Any], Any], kind: str) -> None:
        value = getattr(self, name)
        if value is None and name in ("max_tokens", "seed"):
            return
        try:
            object.__setattr__(self, name, convert(value))
        except TypeError as error:
            raise RequestError(f"{name} must be {kind}, got {value!r}") from error


def _real(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError("text is no number")
    return float(value)
