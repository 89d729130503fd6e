"""Finds stop strings in text that arrives in pieces, and holds back only what may still become one."""

from __future__ import annotations


class StopMatcher:
    """Watches one request's text for its stop strings.

    The first stop string that is complete, reading character by character, ends the text; of several that end at the
    same character the longest counts. So the result does not depend on where token borders fall. Held back is the
    longest tail that may still grow into a stop string, at most one character less than the longest of them. Work per
    character is constant (Knuth, Morris and Pratt 1977, one automaton per stop string): text is never scanned twice.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)  # how much of each stop string the text so far ends with
        self._held = ""
        self._hit = False

    def add(self, text: str) -> tuple[str, bool]:
        """Takes the next piece; gives the text that is now safe to show and whether a stop string was hit.

        On a hit that text ends just before the stop string, and everything after it is dropped.
        """
        assert not self._hit, "nothing may be added after a hit"
        if not self._stops:
            return text, False
        for index, char in enumerate(text):
            hit = self._advance(char)
            if hit:
                self._hit = True
                safe = (self._held + text[: index + 1])[:-hit]
                self._held = ""
                return safe, True
        pending = self._held + text
        safe = pending[: len(pending) - max(self._matched)]
        self._held = pending[len(safe) :]
        return safe, False

    def finish(self) -> str:
        """The held text, at the end of a generation that hit no stop string; empty after a hit."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Moves every automaton by one character; gives the length of the longest stop string complete here, or 0."""
        hit = 0
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                hit = max(hit, matched)
                matched = borders[matched - 1]
            self._matched[i] = matched
        return hit


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[matched] != stop[i]:
            matched = borders[matched - 1]
        if stop[matched] == stop[i]:
            matched += 1
        borders[i] = matched
    return borders
