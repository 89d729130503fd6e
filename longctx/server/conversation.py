"""Messages and tools as clients send them, made into what chat templates read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json
from transformers import PreTrainedTokenizerBase

from longctx.server.body import bad, kind_of
from longctx.server.text_side import TemplateTraits, clip

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TOOLS = 1024
MAX_NAME_CHARS = 256

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MEDIA = ("image", "audio", "file", "video")
_KEPT = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
_QUIET = {"role", "content", "tool_calls", "refusal", "annotations", "audio", "function_call", "id", "status", "type"}
"""Fields of messages that clients send back as they got them, beside those that templates read."""

_NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,256}")

# Names that are arguments of the template's caller and no variables of a conversation.
_RESERVED = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *("messages", "param", "tokenizer"),
    *("bos_token", "eos_token", "unk_token", "pad_token", "raise_exception", "strftime_now"),
}


def read_messages(
    messages: Sequence[Any], traits: TemplateTraits, warnings: list[str], names: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Messages with text contents and known roles. Raises `ApiError` for pictures, sound and whatever is no message.

    `names` are what errors call them, instead of messages[i].
    """
    if not messages:
        raise bad("messages is empty: send at least one", "messages")
    ignored: set[str] = set()
    read = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]" if names is None else names[i]
        if not isinstance(message, dict):
            raise bad(f"{where} should be an object, got {kind_of(message)}", where)
        read.append(_message(message, where, traits))
        ignored.update(name for name in message if name not in _QUIET and name not in _KEPT)
        if len(ignored) > 8:
            raise bad(f"{where} has fields that no message has, such as {clip(min(ignored), 64)!r}", where)
    warnings.extend(f"messages: the field {clip(name, 64)} is ignored" for name in sorted(ignored))
    return read


def read_tools(tools: Sequence[Any] | None, choice: Any, traits: TemplateTraits) -> list[dict[str, Any]] | None:
    """The functions a template is to be told of, None for none. Raises `ApiError` for what cannot be honoured."""
    known_choice = choice in (None, "auto", "none") if not isinstance(choice, dict) else False
    if not known_choice:
        raise bad(
            "tool_choice can be auto or none here, since a call cannot be forced: ask for it in a message",
            "tool_choice",
            "unsupported_value",
        )
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise bad(f"at most {MAX_TOOLS} tools, got {len(tools):,}", "tools")
    read = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if choice == "none":
        return None
    if not traits.tools:
        raise bad(
            "this model's chat template does not know tools: leave tools out or send tool_choice none, serve a model "
            "that was trained for tools, or start the server with a --chat-template that has them",
            "tools",
            "unsupported_parameter",
        )
    return read


def read_template_options(options: dict[str, Any], traits: TemplateTraits, warnings: list[str]) -> dict[str, Any]:
    """Variables for the template (`enable_thinking`, ...); one that it does not read is left out with a warning."""
    for name in options:
        if name in _RESERVED:
            raise bad(f"chat_template_kwargs cannot set {clip(name, 64)}", "chat_template_kwargs")
    unread = [name for name in options if name not in traits.variables]
    warnings.extend(
        f"chat_template_kwargs: this model's template does not read {clip(name, 64)}" for name in unread[:8]
    )
    return {name: value for name, value in options.items() if name in traits.variables}


def _message(message: dict[str, Any], where: str, traits: TemplateTraits) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        got = f"got {clip(role, 64)!r}" if isinstance(role, str) else f"got {kind_of(role)}"
        raise bad(f"{where}.role should be one of {', '.join(ROLES)}, {got}", f"{where}.role")
    if role == "developer" and not traits.developer_role:
        role = "system"
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise bad(f"{where}.{name} is not supported: send text and tool_calls", f"{where}.{name}")
    calls = message.get("tool_calls") or None
    out: dict[str, Any] = {
        "role": role,
        "content": _content(message.get("content"), where, optional=role == "assistant"),
    }
    for name in _KEPT:
        if (value := message.get(name)) is not None:
            if not isinstance(value, str):
                raise bad(f"{where}.{name} should be a string, got {kind_of(value)}", f"{where}.{name}")
            out[name] = value
    if calls is not None:
        if role != "assistant":
            raise bad(f"{where}.tool_calls belongs to the role assistant", f"{where}.tool_calls")
        out["tool_calls"] = _calls(calls, where)
    return out


def _content(content: Any, where: str, optional: bool) -> str:
    """A content's text; its parts are joined by line ends, which is what most servers do."""
    where = f"{where}.content"
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list) or not content:
        got = "an empty list" if content == [] else kind_of(content)
        raise bad(f"{where} should be a string or a list of text parts, got {got}", where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise bad(f"{where} should be an object with type and text, got {kind_of(part)}", where)
    kind = part.get("type")
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        if isinstance(kind, str) and any(word in kind for word in _MEDIA):
            raise bad(f"{where} is no text: this server reads text only", f"{where}.type", "unsupported_content")
        raise bad(f"{where}.type should be text", f"{where}.type")
    if not isinstance(part.get(field), str):
        raise bad(f"{where}.{field} should be a string, got {kind_of(part.get(field))}", f"{where}.{field}")
    return str(part[field])


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls the model made earlier. Templates want arguments as an object, clients send them as JSON in a string."""
    where = f"{where}.tool_calls"
    if not isinstance(calls, list):
        raise bad(f"{where} should be a list, got {kind_of(calls)}", where)
    read = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(f"{where}[{i}] should be an object with a function that has a name", f"{where}[{i}]")
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str | dict):
            raise bad(f"{where}[{i}].function.arguments should be a string", f"{where}[{i}].function.arguments")
        kept: dict[str, Any] = {"type": "function"}
        if isinstance(call.get("id"), str):
            kept["id"] = call["id"]
        kept["function"] = {"name": function["name"], "arguments": _arguments(arguments)}
        read.append(kept)
    return read


def _arguments(arguments: str | dict[str, Any]) -> Any:
    if isinstance(arguments, dict):
        return arguments
    try:
        value = from_json(arguments, allow_inf_nan=False)
    except ValueError:
        return arguments  # what a model once wrote need not be JSON, and the conversation goes on all the same
    return value if isinstance(value, dict) else arguments


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise bad(f"{where} should be an object, got {kind_of(tool)}", where)
    if tool.get("type") != "function":
        raise bad(f"{where}.type should be function: this server runs no tools itself", f"{where}.type")
    # /v1/responses has the function's fields beside its type.
    function = tool.get("function") if "function" in tool else {k: v for k, v in tool.items() if k != "type"}
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad(
            f"{where} should have a function with a name of letters, digits, _, - or ., at most {MAX_NAME_CHARS}",
            f"{where}.function.name",
        )
    if not isinstance(function.get("parameters"), dict | None) or not isinstance(
        function.get("description"), str | None
    ):
        raise bad(f"{where}.function should have a description that is text and parameters that are an object", where)
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None and k != "strict"}}


def tool_names(tools: Sequence[dict[str, Any]] | None) -> tuple[str, ...]:
    """Their names, in order."""
    return tuple(str(tool["function"]["name"]) for tool in tools or ())
