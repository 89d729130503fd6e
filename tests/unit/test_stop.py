"""Stop strings: the same result wherever token borders fall, nothing shown too early, nothing held too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.stop import StopMatcher


def run(stops, pieces):
    """(text shown after each piece, whether a stop string was hit, text released at the end)."""
    matcher, shown = StopMatcher(tuple(stops)), []
    for piece in pieces:
        safe, hit = matcher.add(piece)
        shown.append(safe)
        if hit:
            return shown, True, matcher.finish()
    return shown, False, matcher.finish()


def first_end(stops, text):
    """Reference: cut before the stop string that is complete first; of equals before the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "hit", "rest"),
    [
        ((), ["a", "b"], ["a", "b"], False, ""),
        (("STOP",), ["abcST", "OPx"], ["abc", ""], True, ""),
        (("STOP",), ["S", "T", "O", "x"], ["", "", "", "STOx"], False, ""),
        (("STOP",), ["abcSTO"], ["abc"], False, "STO"),
        (("aab",), ["a", "a", "a", "b"], ["", "", "a", ""], True, ""),
        (("abcd", "bc"), ["ab", "cd"], ["", "a"], True, ""),
        (("abcd", "bc"), ["abcd"], ["a"], True, ""),
        (("bc", "abc"), ["xab", "c"], ["x", ""], True, ""),
        (("abab",), ["ababab"], [""], True, ""),
        (("abac", "ba"), ["xaba"], ["xa"], True, ""),
        (("\n\nQ:", "\n\n\n"), ["a\n", "\n", "\nQ:"], ["a", "", ""], True, ""),
        (("👍🏽",), ["👍", "x👍", "🏽y"], ["", "👍x", ""], True, ""),
    ],
)
def test_cases(stops, pieces, shown, hit, rest):
    assert run(stops, pieces) == (shown, hit, rest)


def test_overlapping_stop_strings_hold_the_longest_prefix():
    matcher = StopMatcher(("abcabd", "cab!"))
    assert matcher.add("xabcab") == ("x", False), "abcab may become the first, though cab may become the second"
    assert matcher.add("c") == ("abc", False), "abcabc ends with abc, a prefix of the first"
    assert matcher.finish() == "abc"


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_the_result_does_not_depend_on_the_pieces(stops, pieces):
    text = "".join(pieces)
    for cut in (pieces, list(text), [text]):
        shown, hit, rest = run(stops, cut)
        assert ("".join(shown) + rest, hit) == first_end(stops, text)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_exactly_what_may_become_a_stop_string_is_held(stops, pieces):
    """Never shown and taken back later, never held without need, and never more than the longest stop string."""
    matcher, text, shown = StopMatcher(tuple(stops)), "", ""
    for piece in pieces:
        text += piece
        safe, hit = matcher.add(piece)
        shown += safe
        if hit:
            return
        held = text[len(shown) :]
        assert len(held) < max(map(len, stops))
        tails = [text[i:] for i in range(len(text) + 1)]
        assert held == next(tail for tail in tails if any(stop.startswith(tail) for stop in stops))


def test_nothing_follows_a_hit():
    matcher = StopMatcher(("x",))
    assert matcher.add("ax") == ("a", True)
    with pytest.raises(AssertionError):
        matcher.add("b")


def test_work_per_character_is_constant():
    """B97: a stop check that scans all text makes tokens slower as the output grows (vllm-project/vllm#24174).

    The worst case for a prefix search: text that is always nearly a stop string. Automaton moves are counted.
    """
    stops = ("a" * 50 + "b", "a" * 40 + "c", "ab" * 20 + "d", "never")
    matcher, moves = StopMatcher(stops), []
    advance = matcher._advance

    def counting(char):
        moves[-1] += 1
        return advance(char)

    matcher._advance = counting
    for _ in range(20_000):
        moves.append(0)
        matcher.add("aa")
        assert len(matcher._held) <= 50
    assert set(moves) == {2}, "each character is looked at once"
