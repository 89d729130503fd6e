"""Tool calls are found however the answer is cut, and nothing else of it is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.server.tool_calls import ToolCall, ToolCallParser

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Köln", "days": [1, 2]}}\n</tool_call>'


def parse(text: str, cuts: list[int] | None = None) -> list[str | ToolCall]:
    """The whole answer through a parser, cut at `cuts`; neighbouring texts joined."""
    parser, parts, start = ToolCallParser(), [], 0
    for cut in [*sorted(cuts or []), len(text)]:
        parts += parser.add(text[start:cut])
        start = cut
    joined: list[str | ToolCall] = []
    for part in parts + parser.finish():
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def shape(parts: list[str | ToolCall]) -> list[object]:
    return [p if isinstance(p, str) else (p.name, json.loads(p.arguments)) for p in parts]


CASES = {
    "no call": ("Just text, with a < and a <tool and {}.", ["Just text, with a < and a <tool and {}."]),
    "only white space": ("  \n\n ", ["  \n\n "]),
    "one call": (CALL, [("look_up", {"city": "Köln", "days": [1, 2]})]),
    "text before": (f"Let me see.\n\n{CALL}", ["Let me see.", ("look_up", {"city": "Köln", "days": [1, 2]})]),
    "text between and after": (
        '<tool_call>{"name":"a"}</tool_call>\n and \n<tool_call>{"name":"b"}</tool_call>\n.',
        [("a", {}), "and", ("b", {}), "."],
    ),
    "two calls": (
        '<tool_call>{"name":"a","arguments":{}}</tool_call>\n<tool_call>{"name":"a","arguments":{"x":1}}</tool_call>\n',
        [("a", {}), ("a", {"x": 1})],
    ),
    "several in one block": ('<tool_call>[{"name":"a"},{"name":"b"}]</tool_call>', [("a", {}), ("b", {})]),
    "closing tag missing": ('<tool_call>{"name":"a","arguments":{"x":"</tool"}}', [("a", {"x": "</tool"})]),
    "parameters": ('<tool_call>{"name":"a","parameters":{"x":1}}</tool_call>', [("a", {"x": 1})]),
    "arguments as text": ('<tool_call>{"name":"a","arguments":"{\\"x\\": 1}"}</tool_call>', [("a", {"x": 1})]),
    "line break in a string": ('<tool_call>{"name":"a","arguments":{"x":"1\n2"}}</tool_call>', [("a", {"x": "1\n2"})]),
    "surrogates": ('<tool_call>{"name":"a","arguments":{"x":"\\ud83d"}}</tool_call>',) * 2,
    "broken JSON": ('Hm <tool_call>{"name": "a", </tool_call> so', ['Hm <tool_call>{"name": "a", </tool_call> so']),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', ['<tool_call>{"arguments": {}}</tool_call>']),
    "not finite": ('<tool_call>{"name":"a","arguments":{"x":NaN}}</tool_call>',) * 2,
    "cut off": ('Yes. <tool_call>{"name": "a", "argu', ['Yes. <tool_call>{"name": "a", "argu']),
    "half a tag at the end": ("a\n<tool_ca", ["a\n<tool_ca"]),
    "deep": ("<tool_call>" + "[" * 100_000 + "</tool_call>",) * 2,
}


@pytest.mark.parametrize("name", CASES)
def test_whole(name: str) -> None:
    text, expected = CASES[name]
    assert shape(parse(text)) == ([expected] if isinstance(expected, str) else expected)


@pytest.mark.parametrize("name", CASES)
def test_cut_into_characters(name: str) -> None:
    text = CASES[name][0][:2000]
    assert shape(parse(text, list(range(1, len(text))))) == shape(parse(text))


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", '{"name":"a"}', "<tool", " ", "\n", "x", "é"]), max_size=12
    ),
    st.lists(st.integers(0, 120), max_size=6),
)
def test_cuts_do_not_matter(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    assert shape(parse(text, [c for c in cuts if c < len(text)])) == shape(parse(text))


def test_content_is_not_held_back() -> None:
    parser = ToolCallParser()
    assert parser.add("a b") == ["a b"]
    assert parser.add(" c <to") == [" c"]
    assert parser.add("p>") == [" <top>"]
    assert parser.finish() == []


def test_ids_differ() -> None:
    calls = [p for p in parse(CALL + CALL) if isinstance(p, ToolCall)]
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") for call in calls)
