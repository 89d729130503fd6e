"""The input of /v1/responses, made into the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longctx.server.body import bad, kind_of
from longctx.server.schema import ResponsesRequest
from longctx.server.text_side import clip

_REFUSED = {
    "background": "a job does not need the client to wait: POST /v1/jobs with endpoint /v1/responses and this body",
    "previous_response_id": "answers are not stored: send the whole conversation in input",
    "conversation": "conversations are not stored: send the whole one in input",
    "prompt": "prompts are not stored: send the text in input",
}
"""Fields that would change what the answer is, and what to do instead."""


def messages_of(request: ResponsesRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """Instructions and input items as chat messages, and what the request calls each of them.

    Raises `ApiError` for items that this server cannot honour.
    """
    for name, remedy in _REFUSED.items():
        if getattr(request, name):
            raise bad(f"{name} is not supported: {remedy}", name, "unsupported_parameter")
    messages: list[dict[str, Any]] = []
    names: list[str] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
        names.append("instructions")
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}], [*names, "input"]
    if not isinstance(request.input, list) or not request.input:
        got = "an empty list" if request.input == [] else kind_of(request.input)
        raise bad(f"input should be a string or a list of items, got {got}", "input")
    for i, item in enumerate(request.input):
        _add(messages, item, f"input[{i}]")
        names.extend([f"input[{i}]"] * (len(messages) - len(names)))
    return messages, names


def wants_logprobs(request: ResponsesRequest) -> int | None:
    """How many alternatives per token, None for none."""
    if "message.output_text.logprobs" in (request.include or ()) or request.top_logprobs:
        return request.top_logprobs or 0
    return None


def check_text_format(request: ResponsesRequest) -> None:
    """Raise `ApiError` where another format than text is wanted."""
    check_format((request.text or {}).get("format"), "text.format")


def check_format(wanted: Any, param: str) -> None:
    """Raise `ApiError` for JSON modes: nothing here can force an answer into a grammar."""
    if wanted is None or (isinstance(wanted, dict) and wanted.get("type") == "text"):
        return
    raise bad(
        f"{param} can only be text here, since an answer cannot be forced into a form: describe the JSON that you want "
        "in a message and check it",
        param,
        "unsupported_parameter",
    )


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    if not isinstance(item, dict):
        raise bad(f"{where} should be an object, got {kind_of(item)}", where)
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({k: v for k, v in item.items() if k not in ("type", "id", "status")})
    elif kind == "function_call":
        _add_call(messages, item, where)
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise bad(f"{where}.call_id should be a string, got {kind_of(item.get('call_id'))}", f"{where}.call_id")
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item.get("output")})
    elif kind != "reasoning":  # an earlier answer's reasoning is not shown to the model again, as OpenAI does it
        got = clip(kind, 64) if isinstance(kind, str) else kind_of(kind)
        raise bad(
            f"{where}.type should be message, function_call, function_call_output or reasoning, got {got}",
            f"{where}.type",
            "unsupported_content",
        )


def _add_call(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """A call of the assistant's; calls that follow each other or their message are one turn, as templates have it."""
    for name in ("name", "arguments"):
        if not isinstance(item.get(name), str):
            raise bad(f"{where}.{name} should be a string, got {kind_of(item.get(name))}", f"{where}.{name}")
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"type": "function", "id": item.get("call_id"), "function": function}
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": None})
    last = messages[-1]
    calls: Sequence[Any] = last.get("tool_calls") or ()
    last["tool_calls"] = [*calls, call]


def repeated(request: ResponsesRequest) -> dict[str, Any]:
    """What a response object says again of its request."""
    names = (
        *("instructions", "metadata", "max_output_tokens", "parallel_tool_calls", "tool_choice", "tools", "truncation"),
        *("temperature", "top_p", "user", "reasoning", "text", "top_logprobs", "max_tool_calls"),
    )
    return {name: value for name in names if (value := getattr(request, name)) is not None}
