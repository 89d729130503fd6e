"""JSON in pieces of bounded size: a huge answer neither doubles in memory nor holds the interpreter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_ITEMS = 256
"""Entries of a list that are written at once."""

_WRITER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def dumps(value: Any) -> str:
    """Compact JSON. Raises ValueError for numbers that JSON has not."""
    return _WRITER.encode(value)


def json_pieces(value: Any, levels: int = 4) -> Iterator[bytes]:
    """The JSON text of `value` in UTF-8; sequences that are no lists (`PromptRows`) count as arrays.

    Down to `levels` containers deep every member is a piece of its own, or several if it is a long array; what lies
    deeper must be small, or short of text.
    """
    if isinstance(value, Mapping) and levels:
        yield b"{"
        for i, (key, item) in enumerate(value.items()):
            yield f"{',' if i else ''}{dumps(key)}:".encode()
            yield from json_pieces(item, levels - 1)
        yield b"}"
    elif _is_array(value) and (len(value) > MOST_ITEMS or not isinstance(value, list)):
        yield b"["
        for start in range(0, len(value), MOST_ITEMS):
            text = dumps(list(value[start : start + MOST_ITEMS]))
            yield f"{',' if start else ''}{text[1:-1]}".encode()
        yield b"]"
    elif _is_array(value) and levels:
        yield b"["
        for i, item in enumerate(value):
            if i:
                yield b","
            yield from json_pieces(item, levels - 1)
        yield b"]"
    else:
        yield dumps(value).encode()


def _is_array(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
