"""Bytes to a checked request: JSON, field names, types and ranges, each refusal short and without the input."""

from __future__ import annotations

import re
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from longctx.server.errors import ApiError
from longctx.server.messages import ModelInfo
from longctx.server.schema import Body
from longctx.server.text_side import clip

MAX_CONTAINERS = 500_000
MAX_STRINGS = 1_000_000
"""Objects and lists, and strings, in one body; a parsed one takes up to forty times the bytes that it was sent in."""

SPARE_VALUES = 1_000_000
"""Values in one body beside the token ids of its prompts."""

MAX_FIELDS = 1_000

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class Limits(Protocol):
    """What of `ServerSettings` matters here."""

    @property
    def served_name(self) -> str | None: ...
    @property
    def max_choices(self) -> int: ...


B = TypeVar("B", bound=Body)


def read_body(
    kind: type[B], body: bytes | bytearray | memoryview, limits: Limits, info: ModelInfo
) -> tuple[B, list[str]]:
    """The request in a body, and what to warn its sender about. Raises `ApiError`, 400 or 404 for another model."""
    fields = parse_object(body, max_values=info.longest_request * limits.max_choices + SPARE_VALUES)
    request = check(kind, fields)
    served = served_name(limits, info)
    if request.model is not None and request.model != served:
        raise ApiError(
            404,
            f"the model {clip(request.model, 100)!r} does not exist; this server has {served!r}",
            code="model_not_found",
            param="model",
        )
    return request, [f"{name} has no effect: {why}" for name, why in kind.unused.items() if _asks(request, name)]


def served_name(limits: Limits, info: ModelInfo) -> str:
    """The name that the served model goes by."""
    return limits.served_name or info.model


def parse_object(body: bytes | bytearray | memoryview, max_values: int) -> dict[str, Any]:
    """A JSON object; RFC 8259 to the letter, so no NaN, no lone surrogates, and at most 200 levels."""
    raw = bytes(body) if not isinstance(body, bytes) else body
    if not raw.strip(b" \t\r\n"):
        raise ApiError(400, "the body is empty: send a JSON object", code="invalid_json")
    _check_size(raw, max_values)
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {clip(str(error), 200)}", code="invalid_json") from None
    except (MemoryError, RecursionError):
        raise ApiError(400, "the body needs too much memory to be read", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {kind_of(value)}", code="invalid_json")
    return value


def check(kind: type[B], fields: dict[str, Any]) -> B:
    """Fields to their model. The first thing that is wrong is named, as OpenAI names it."""
    if len(fields) > MAX_FIELDS:
        raise ApiError(400, f"the body has more than {MAX_FIELDS:,} fields")
    known = kind.model_fields
    given = {name: _drop_nulls(value) for name, value in fields.items() if value is not None or name not in known}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _refusal(first["type"], first["loc"], first["msg"]) from None


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A refusal of a field's value."""
    return ApiError(400, message, code=code, param=param)


def kind_of(value: Any) -> str:
    """A JSON value's type as JSON calls it."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _drop_nulls(value: Any) -> Any:
    """null stands for an absent field in options (`stream_options`) too; anything deeper is looked at by its reader."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _asks(request: Body, name: str) -> bool:
    """Whether a field that has no effect here was set to something that would have one."""
    value = getattr(request, name)
    return value not in (None, False, [], {}) and not (name == "service_tier" and value in ("auto", "default"))


def _refusal(kind: str, location: tuple[int | str, ...], message: str) -> ApiError:
    name = clip("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip("."), 100)
    if kind == "missing":
        return bad(f"you must provide the parameter {name}", name, "missing_required_parameter")
    if kind == "extra_forbidden":
        return bad(f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")
    said = message.removeprefix("Input ")
    return bad(f"{name} {said}" if said != message else f"{name}: {message}", name, "invalid_type")


def _check_size(body: bytes, max_values: int) -> None:
    """Refuse what would be parsed into far more memory than it was sent in; looks twice only at suspects.

    What stands inside a string costs nothing more, so a long prompt may be full of braces and quotes.
    """
    quotes = body.count(b'"')
    if quotes - body.count(b'\\"') > 2 * MAX_STRINGS:  # not fewer than these begin or end one
        raise bad(f"the body has more than {MAX_STRINGS:,} strings")
    many = quotes > 2 * MAX_STRINGS or _opened(body, 0, len(body)) > MAX_CONTAINERS
    if not many and body.count(b",") <= max_values:
        return
    opened = values = end = 0
    for number, match in enumerate(_STRING.finditer(body)):
        opened += _opened(body, end, match.start())
        values += body.count(b",", end, match.start())
        end = match.end()
        if number >= MAX_STRINGS:
            raise bad(f"the body has more than {MAX_STRINGS:,} strings")
        if opened > MAX_CONTAINERS or values > max_values:
            break
    if opened + _opened(body, end, len(body)) > MAX_CONTAINERS:
        raise bad(f"the body has more than {MAX_CONTAINERS:,} objects and lists")
    if values + body.count(b",", end) > max_values:
        raise bad(f"the body has more than {max_values:,} values", code="context_length_exceeded")


def _opened(body: bytes, start: int, end: int) -> int:
    """How many objects and lists begin in a part of a body that has no strings."""
    return body.count(b"{", start, end) + body.count(b"[", start, end)
