"""JSON in pieces is the same JSON, however its arrays are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.server.json_pieces import MOST_ITEMS, json_pieces

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


@given(VALUES)
def test_pieces_are_the_same_json(value: Any) -> None:
    assert json.loads(b"".join(json_pieces(value))) == value


@pytest.mark.parametrize("num", [0, 1, MOST_ITEMS - 1, MOST_ITEMS, MOST_ITEMS + 1, 3 * MOST_ITEMS])
def test_long_arrays(num: int) -> None:
    for items in (range(num), list(range(num)), tuple(range(num))):
        value = {"a": [{"b": items}], "c": "é"}
        pieces = list(json_pieces(value))
        assert json.loads(b"".join(pieces)) == {"a": [{"b": list(range(num))}], "c": "é"}
        assert max(map(len, pieces)) < 6 * MOST_ITEMS
        assert num <= MOST_ITEMS or len(pieces) < 20 + num / MOST_ITEMS


def test_what_json_has_not_is_refused() -> None:
    with pytest.raises(ValueError):
        list(json_pieces({"a": [float("nan")]}))
