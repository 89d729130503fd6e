"""Finds tool calls in an answer that arrives in pieces: `<tool_call>{...}</tool_call>`, as Hermes writes them."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """One call that the model wants made; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


class ToolCallParser:
    """Splits an answer's text into content and calls, in their order.

    A call is given whole when its block closes, or at the end of the answer if only the closing tag is missing. A block
    that is no call (broken JSON, no name) is given as content, as the model wrote it: nothing of an answer is lost.
    White space beside a call belongs to the format and is dropped.
    """

    def __init__(self) -> None:
        self._held = ""
        """Outside a block: white space and what may become an opening tag. Inside: the last characters of the block."""
        self._block: list[str] | None = None
        self._gap = ""
        """White space before an open block, given back if the block is no call."""
        self._has_calls = False
        self._after_call = False

    def add(self, text: str) -> list[str | ToolCall]:
        """Takes the next piece; gives what is certain now."""
        given: list[str | ToolCall] = []
        while text:
            text = self._add_outside(text, given) if self._block is None else self._add_inside(text, given)
        return _joined(given)

    def finish(self) -> list[str | ToolCall]:
        """What was still held, at the end of the answer."""
        given: list[str | ToolCall] = []
        if self._block is not None:
            self._close("".join(self._block) + self._held, given, closing="")
        elif self._held.strip() or not self._has_calls:
            given.append(self._held)
        self._held = ""
        return _joined(given)

    def _add_outside(self, text: str, given: list[str | ToolCall]) -> str:
        pending = self._held + text
        if self._after_call:
            pending = pending.lstrip()
            self._after_call = not pending
        content, tag, rest = pending.partition(OPEN)
        if tag:
            text = content.rstrip()
            self._held, self._block, self._gap = "", [], content[len(text) :]
            given.append(text)
            return rest
        certain = pending[: len(pending) - _overlap(pending, OPEN)].rstrip()
        self._held = pending[len(certain) :]
        given.append(certain)
        return ""

    def _add_inside(self, text: str, given: list[str | ToolCall]) -> str:
        assert self._block is not None
        pending = self._held + text
        body, tag, rest = pending.partition(CLOSE)
        if not tag:
            keep = len(CLOSE) - 1
            self._block.append(pending[:-keep])
            self._held = pending[-keep:]
            return ""
        self._held = ""
        self._close("".join(self._block) + body, given, closing=CLOSE)
        return rest

    def _close(self, body: str, given: list[str | ToolCall], closing: str) -> None:
        calls = _calls_of(body)
        self._block, self._after_call = None, bool(calls)
        self._has_calls |= bool(calls)
        given.extend(calls or [self._gap + OPEN + body + closing])


def _calls_of(body: str) -> list[ToolCall]:
    """The calls of one block's text; none if it is no valid call."""
    try:
        # Not strict: models write line breaks inside strings as they are.
        value = json.loads(body, strict=False)
        return [_call_of(call) for call in (value if isinstance(value, list) else [value])]
    except (ValueError, RecursionError):
        return []


def _call_of(value: Any) -> ToolCall:
    """One call; `ValueError` if it has no name, or holds what no JSON or UTF-8 text can."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("a call needs a name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
    (name + arguments).encode()
    return ToolCall(f"call_{secrets.token_hex(12)}", name, arguments)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`, shorter than `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)


def _joined(given: list[str | ToolCall]) -> list[str | ToolCall]:
    """Neighbouring texts made one, empty ones left out."""
    parts: list[str | ToolCall] = []
    for part in given:
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        elif part:
            parts.append(part)
    return parts
