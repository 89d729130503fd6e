"""Whatever JSON is sent, it is prepared or refused: no other error, no huge refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longctx.server.errors import ApiError
from longctx.server.schema import REQUESTS
from longctx.server.settings import ServerSettings
from longctx.server.text_tasks import TASKS, perform
from tests.helpers.text_side import TOOLS, make_info, make_text

TEXT, INFO, SETTINGS = make_text(TOOLS), make_info(), ServerSettings()
GOOD: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "hello"},
    "chat": {"messages": [{"role": "user", "content": "hello"}]},
    "responses": {"input": "hello"},
    "tokenize": {"prompt": "hello"},
    "detokenize": {"tokens": [70, 71]},
    "plan": {"prompt": "hello"},
}
WORDS = st.sampled_from(
    [
        *("user", "assistant", "tool", "system", "developer", "text", "function", "message", "function_call", "auto"),
        *(
            "type",
            "role",
            "content",
            "name",
            "arguments",
            "call_id",
            "output",
            "parameters",
            "format",
            "effort",
            "none",
        ),
        *(
            "tool_calls",
            "tool_call_id",
            "image_url",
            "",
            "a",
            "128K",
            "5",
            "\u0000",
            "\u2028",
            "😀",
            "<|start|>",
            "{{ x }}",
        ),
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    WORDS,
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=12
)


@pytest.mark.parametrize("task", GOOD)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_good_body_with_anything_in_some_fields(task: str, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(REQUESTS[task].model_fields))
    changes = data.draw(st.dictionaries(names, ANYTHING, max_size=4))
    answer_of(task, json.dumps({**GOOD[task], **changes}).encode())


@pytest.mark.parametrize("field", ["messages", "tools", "input"])
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_lists_of_objects_with_likely_keys(field: str, data: st.DataObject) -> None:
    task = "responses" if field == "input" else "chat"
    items = data.draw(st.lists(st.dictionaries(WORDS, ANYTHING, max_size=5), min_size=1, max_size=3))
    for item in items:
        item.update(data.draw(st.sampled_from([{}, {"role": "user"}, {"role": "assistant"}, {"type": "function"}])))
    answer_of(task, json.dumps({**GOOD[task], field: items}).encode())


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    body=st.binary(max_size=40)
    | st.text(alphabet='{}[]":,\\ud8ntruefals0123456789.eE+-" ', max_size=40).map(str.encode)
)
def test_any_bytes(body: bytes) -> None:
    answer_of("chat", body)


def answer_of(task: str, body: bytes) -> None:
    try:
        perform(task, body, TEXT, SETTINGS, INFO)
    except ApiError as error:
        assert error.status in (400, 404)
        assert len(json.dumps(error.body())) < 2000 and "\n" not in error.message


def test_every_endpoint_is_covered() -> None:
    assert set(GOOD) == set(TASKS) - {"job"}
