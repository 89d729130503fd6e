"""The response object and the events of its stream, read by OpenAI's own client."""

from __future__ import annotations

from typing import Any

from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from longctx.server.errors import ApiError
from longctx.server.json_pieces import dumps
from longctx.server.reply_responses import failed_early
from tests.helpers.fake_running import FakeRunning, chunks_of, progressed, said, whole_of

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALL = '<tool_call>{"name": "look_up", "arguments": {"key": 4711}}</tool_call>'


def replay(chunks: list[dict[str, Any]]) -> Any:
    """The client's own reading of a stream of events; its last state."""
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for chunk in chunks:
        state.handle_event(EVENT.validate_json(dumps(chunk), strict=True))
    return state


def test_the_events_of_a_response() -> None:
    chunks = chunks_of(FakeRunning("responses", said("the key", reason="stop")))
    kinds = [chunk["type"] for chunk in chunks]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [chunk["sequence_number"] for chunk in chunks] == list(range(len(chunks)))
    whole = whole_of(FakeRunning("responses", said("the key", reason="stop")))
    assert {**chunks[-1]["response"], "completed_at": 0} == {**whole, "completed_at": 0}


def test_a_response_cut_by_its_length() -> None:
    chunks = chunks_of(FakeRunning("responses", said("the key", reason="length")))
    assert chunks[-1]["type"] == "response.incomplete"
    response = chunks[-1]["response"]
    assert response["status"] == "incomplete" == response["output"][0]["status"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_responses_tool_calls() -> None:
    items = said(f"See. {CALL} Then {CALL}", reason="stop")
    chunks = chunks_of(FakeRunning("responses", items, tools=("look_up",)))
    replay(chunks)
    output = chunks[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message", "function_call"]
    assert output[1]["arguments"] == '{"key": 4711}' and output[1]["call_id"] != output[3]["call_id"]
    assert len({item["id"] for item in output}) == 4
    whole = whole_of(FakeRunning("responses", items, tools=("look_up",)))
    assert [item["type"] for item in whole["output"]] == [item["type"] for item in output]


def test_a_response_repeats_its_request() -> None:
    extra = {"instructions": "be brief", "metadata": {"a": "b"}, "tool_choice": "none", "temperature": 0.5}
    whole = whole_of(FakeRunning("responses", said("ab"), extra=extra))
    assert extra.items() <= whole.items()
    Response.model_validate_json(dumps(whole), strict=True)


def test_progress_of_a_response_goes_through_the_client() -> None:
    items = [progressed(1), progressed(2), *said("ab", reason="stop")]
    chunks = chunks_of(FakeRunning("responses", items, return_progress=True, extra={"instructions": "x" * 10_000}))
    replay(chunks)
    progress = [chunk for chunk in chunks if "prompt_progress" in chunk]
    assert [chunk["prompt_progress"]["processed"] for chunk in progress] == [0, 1, 2]
    assert all(len(dumps(chunk)) < 1000 for chunk in progress), "what the sender knows is not sent again and again"


def test_a_failure_closes_what_is_open() -> None:
    items = [*said("half an ans")[:-1], ApiError(504, "too late", type="timeout_error", code="deadline_exceeded")]
    chunks = chunks_of(FakeRunning("responses", items))
    replay(chunks)
    response = chunks[-1]["response"]
    assert response["status"] == "failed" and response["error"]["message"] == "too late"
    assert response["output"][0]["status"] == "incomplete"
    assert [chunk["sequence_number"] for chunk in chunks] == list(range(len(chunks)))


def test_a_failure_before_there_was_a_response() -> None:
    event = failed_early(ApiError(400, "too long", code="context_length_exceeded", param="input"))
    parsed = EVENT.validate_json(dumps(event), strict=True)
    assert (parsed.type, parsed.code, parsed.param, parsed.message) == (
        "error",
        "context_length_exceeded",
        "input",
        "too long",
    )
    assert event["error"]["message"] == "too long", "which the client raises"
