"""Prompts of an exact number of tokens: the whole text is tokenized again each time, parts are never added up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from longctx.errors import LongctxError

_FIRST_GUESS = 16
_MAX_TURNS = 100


@dataclass(frozen=True)
class Fitted:
    """A text, how many tokens the model reads of it, and how much material and padding it took."""

    text: str
    tokens: int
    size: int
    padding: int


class Fitter:
    """Finds how much material fills a number of tokens; `count` tokenizes a whole prompt as the model will read it.

    Remembers how long a unit of material was, so that the next text of that kind takes a few counts.
    """

    def __init__(self, count: Callable[[str], int]):
        self.count = count
        self._per_unit: float | None = None

    def fit(self, compose: Callable[[int, int], str], target: int, max_size: int | None = None) -> Fitted:
        """The largest text of at most `target` tokens: material first, then padding words to the token.

        `compose(size, padding)` makes the text; both add tokens and never take any away, up to `max_size`. Raises
        `LongctxError` where not even `compose(0, 0)` fits.
        """
        guess = _FIRST_GUESS if self._per_unit is None else round(target / self._per_unit)
        size, tokens = self.largest(lambda n: compose(n, 0), target, guess, max_size)
        if size:
            self._per_unit = tokens / size
        padding, tokens = self.largest(lambda n: compose(size, n), target, target - tokens)
        return Fitted(compose(size, padding), tokens, size, padding)

    def largest(
        self, text_of: Callable[[int], str], target: int, guess: int, most: int | None = None
    ) -> tuple[int, int]:
        """The largest n, at most `most`, whose `text_of(n)` has at most `target` tokens, and how many it has.

        Interpolates, since counting a long text takes a while, and bisects where that does not close in. `guess` is
        tried first.
        """
        base = low_count = self.count(text_of(0))
        low = 0
        if low_count > target:
            raise LongctxError(f"{target} tokens are too few: the shortest such prompt takes {low_count}")
        high: int | None = None if most is None else most + 1
        high_count = 0  # not known yet
        for turn in range(_MAX_TURNS):
            if high is not None and high - low <= 1:
                return low, low_count
            guess = max(low + 1, guess if high is None else min(guess, high - 1))
            count = self.count(text_of(guess))
            if count <= target:
                low, low_count = guess, count
            else:
                # A count far beyond the target may be no count at all, and would say nothing about the slope.
                high, high_count = guess, count if count <= 4 * target else 0
            if high is not None and turn % 5 == 4:
                guess = (low + high) // 2
            elif high_count == 0:
                guess = low + 1 + (target - low_count) * low // max(1, low_count - base)
            else:
                assert high is not None
                guess = low + (target - low_count) * (high - low) // (high_count - low_count)
        raise LongctxError(f"{target} tokens cannot be filled: the text does not grow with its material")
