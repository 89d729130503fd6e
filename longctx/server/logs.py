"""Structured logs, as text or as JSON: one line per record, each with the request it belongs to."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextvars import ContextVar
from typing import Any, TextIO

request_id: ContextVar[str | None] = ContextVar("longctx_request_id", default=None)
"""The request that the running task works for; whoever begins one sets it, and every line logged under it has it."""

FORMATS = ("text", "json")
UVICORN_LOGGERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
POLLED = ("/health", "/ready", "/metrics", "/v1/requests")
"""What probes, dashboards and the page ask for every second: logged only when the answer is an error."""

FORMAT_VARIABLE = "LONGCTX_LOG_FORMAT"
"""The environment variable by which the processes of one server write alike."""

MAX_EXCERPT_BYTES = 2000

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))} | {
    10: "\\n",
    13: "\\r",
    9: "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
"""A client's text must not be able to write lines of its own, or to talk to the terminal."""


def configure(log_format: str = "text", level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send every logger of this process, uvicorn's included, to `stream` (stderr) in one format.

    Start uvicorn with `log_config=None`, or it puts its own handlers back. Processes started from here may
    `configure_child`. May be called again.
    """
    assert log_format in FORMATS, log_format
    os.environ[FORMAT_VARIABLE] = log_format
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(_add_request_id)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in UVICORN_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    access = logging.getLogger("uvicorn.access")
    access.filters[:] = [_is_worth_a_line]
    # Its lines repeat the access log's, one per request that this process sends.
    logging.getLogger("httpx").setLevel(logging.WARNING)


def configure_child() -> None:
    """In a process that a configured one started: write as it does. Elsewhere nothing changes."""
    log_format = os.environ.get(FORMAT_VARIABLE)
    if log_format in FORMATS:
        configure(log_format)


def log_event(
    logger: logging.Logger, message: str, /, *, level: int = logging.INFO, request: str | None = None, **fields: Any
) -> None:
    """Log a sentence with fields: `message key=value` as text, keys of the object as JSON; fields that are None are
    left out. `request` is its request where that is not the running task's. Nothing of a prompt belongs here."""
    known = {name: value for name, value in fields.items() if value is not None}
    logger.log(level, message, extra={"fields": known, "request_id": request}, stacklevel=2)


def excerpt(body: bytes | bytearray) -> str:
    """The beginning of a request's body, for operators who asked for prompts in their log."""
    text = bytes(body[:MAX_EXCERPT_BYTES]).decode("utf-8", "replace")
    more = len(body) - MAX_EXCERPT_BYTES
    return text if more <= 0 else f"{text}... ({more:,} more bytes)"


class TextFormatter(logging.Formatter):
    """`2025-01-31T09:00:00.123Z info longctx.server.app: message key=value request=id`, tracebacks indented below."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_timestamp(record)} {record.levelname.lower()} {record.name}: "
        parts = [_one_line(record.getMessage())]
        parts += [f"{name}={_field_text(value)}" for name, value in getattr(record, "fields", {}).items()]
        if (request := getattr(record, "request_id", None)) is not None:
            parts.append(f"request={_field_text(request)}")
        lines = [head + " ".join(parts)]
        if (trace := _trace(self, record)) is not None:
            lines += [f"    {_one_line(line)}" for line in trace.splitlines()]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, request_id, the event's fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        data: dict[str, Any] = dict(getattr(record, "fields", {}))
        data |= {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := getattr(record, "request_id", None)) is not None:
            data["request_id"] = request
        if (trace := _trace(self, record)) is not None:
            data["exception"] = trace
        # ASCII: a lone surrogate in a client's text would not encode, and line separators would break lines.
        return json.dumps(data, ensure_ascii=True, default=str)


def _add_request_id(record: logging.LogRecord) -> bool:
    if getattr(record, "request_id", None) is None:
        record.request_id = request_id.get()
    return True


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Uvicorn's access records have (client, method, path with query, HTTP version, status) as their arguments."""
    args = record.args
    if not isinstance(args, tuple) or len(args) != 5:
        return True
    _, method, path, _, status = args
    path = str(path).split("?", 1)[0]
    # Not ready yet is what a probe wants to know, and no error.
    fine = isinstance(status, int) and (status < 400 or (path == "/ready" and status == 503))
    return not (method == "GET" and path.startswith(POLLED) and fine)


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    if not record.exc_info or record.exc_info[0] is None:
        return None
    return formatter.formatException(record.exc_info)


def _field_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _one_line(str(value))
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "=') else text


def _one_line(text: str) -> str:
    # Surrogates cannot be written to a UTF-8 stream: the line would be lost.
    return text.translate(_CONTROLS).encode("utf-8", "backslashreplace").decode("utf-8")
