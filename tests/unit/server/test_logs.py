"""Log lines stay one line each, name their request, and never show a prompt unasked."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from longctx.server import logs

log = logging.getLogger("longctx.test")


@pytest.fixture(autouse=True)
def _restored_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(logs.FORMAT_VARIABLE, "")
    loggers = [logging.getLogger(name) for name in ("", "httpx", *logs.UVICORN_LOGGERS)]
    before = [(lg, lg.handlers[:], lg.filters[:], lg.level, lg.propagate) for lg in loggers]
    yield
    for logger, handlers, filters, level, propagate in before:
        logger.handlers[:], logger.filters[:], logger.propagate = handlers, filters, propagate
        logger.setLevel(level)


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def configured(log_format: str) -> io.StringIO:
    stream = io.StringIO()
    logs.configure(log_format, stream=stream)
    return stream


def test_text_is_one_line_with_fields_and_request() -> None:
    stream = configured("text")
    token = logs.request_id.set("req_1")
    logs.log_event(log, "the request ended", reason="stop", tokens=12, seconds=1.23456789, note="two words")
    logs.request_id.reset(token)
    (line,) = lines(stream)
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info longctx\.test: ", line)
    assert line.endswith('the request ended reason=stop tokens=12 seconds=1.23457 note="two words" request=req_1')


def test_json_is_one_object_per_line() -> None:
    stream = configured("json")
    token = logs.request_id.set("req_1")
    logs.log_event(log, "ended", level=logging.WARNING, reason="stop", tokens=12)
    logs.request_id.reset(token)
    log.info("plain %s", "text")
    first, second = map(json.loads, lines(stream))
    assert first.pop("time")
    assert first == {
        "level": "warning",
        "logger": "longctx.test",
        "message": "ended",
        "request_id": "req_1",
        "reason": "stop",
        "tokens": 12,
    }
    assert second["message"] == "plain text"
    assert "request_id" not in second


def test_a_field_cannot_pose_as_the_record_itself() -> None:
    stream = configured("json")
    logs.log_event(log, "real", message="forged", logger="forged", time="forged")
    (line,) = lines(stream)
    record = json.loads(line)
    assert (record["message"], record["logger"]) == ("real", "longctx.test")
    assert record["time"] != "forged"


@pytest.mark.parametrize("log_format", logs.FORMATS)
@pytest.mark.parametrize("hostile", ["a\nforged line", "a\r\nb", "a\x1b[31mred", "a\x85b", "a\u2028b", "\ud800"])
def test_hostile_text_stays_on_its_line(log_format: str, hostile: str) -> None:
    """A newline in a client's text would forge a record, an escape would reach the operator's terminal."""
    stream = configured(log_format)
    token = logs.request_id.set(hostile)
    logs.log_event(log, f"path {hostile}", path=hostile)
    logs.request_id.reset(token)
    assert len(lines(stream)) == 1
    text = stream.getvalue().rstrip("\n")
    text.encode("utf-8")
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", text)


@pytest.mark.parametrize("log_format", logs.FORMATS)
def test_a_traceback_stays_with_its_line(log_format: str) -> None:
    stream = configured(log_format)
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        log.exception("it failed")
    if log_format == "json":
        (line,) = lines(stream)
        assert "ValueError: first" in json.loads(line)["exception"]
    else:
        head, *trace = lines(stream)
        assert head.endswith("error longctx.test: it failed")
        assert trace and all(line.startswith("    ") for line in trace)


def test_each_task_has_its_own_request() -> None:
    stream = configured("json")

    async def work(name: str) -> None:
        logs.request_id.set(name)
        for _ in range(3):
            await asyncio.sleep(0)
            log.info(name)

    async def both() -> None:
        await asyncio.gather(work("a"), work("b"))

    asyncio.run(both())
    records = [json.loads(line) for line in lines(stream)]
    assert len(records) == 6
    assert all(record["message"] == record["request_id"] for record in records)


def test_an_event_names_its_request_and_leaves_out_what_is_not_known() -> None:
    stream = configured("json")
    token = logs.request_id.set("the task's")
    logs.log_event(log, "ended", request="its own", known=0, unknown=None)
    logs.log_event(log, "ended")
    logs.request_id.reset(token)
    first, second = map(json.loads, lines(stream))
    assert (first["request_id"], first["known"], "unknown" in first) == ("its own", 0, False)
    assert second["request_id"] == "the task's"


def test_a_body_is_shown_by_its_beginning() -> None:
    assert logs.excerpt(b'{"prompt": "a secret"}') == '{"prompt": "a secret"}'
    long = logs.excerpt(bytearray(b"x" * 10_000))
    assert len(long) < 2100 and long.endswith("(8,000 more bytes)")
    assert logs.excerpt("é".encode() * 1001)[:3] == "ééé"
    logs.excerpt(b"\xff" * 3000).encode("utf-8")


@pytest.mark.parametrize("log_format", logs.FORMATS)
def test_a_child_process_writes_alike(log_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configured(log_format)
    code = "from longctx.server import logs; import logging; logs.configure_child(); logging.warning('hello')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = result.stderr.splitlines()
    assert (json.loads(line)["message"] == "hello") if log_format == "json" else line.endswith("warning root: hello")
    monkeypatch.delenv(logs.FORMAT_VARIABLE)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == "WARNING:root:hello\n"


def access(path: str, status: int, method: str = "GET") -> None:
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", method, path, "1.1", status)


def test_uvicorn_writes_through_us_and_polls_do_not_fill_the_log() -> None:
    own = io.StringIO()
    logging.getLogger("uvicorn").addHandler(logging.StreamHandler(own))
    stream = configured("text")
    access("/v1/chat/completions", 200, "POST")
    access("/metrics", 200)
    access("/v1/requests?limit=5", 200)
    access("/ready", 503)
    access("/metrics", 500)
    access("/ready", 500)
    access("/v1/requests/abc", 200, "DELETE")
    logging.getLogger("uvicorn.error").info("Started server process")
    assert [line.split(": ", 1)[1] for line in lines(stream)] == [
        '127.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 200',
        '127.0.0.1:5 - "GET /metrics HTTP/1.1" 500',
        '127.0.0.1:5 - "GET /ready HTTP/1.1" 500',
        '127.0.0.1:5 - "DELETE /v1/requests/abc HTTP/1.1" 200',
        "Started server process",
    ]
    assert own.getvalue() == ""


def test_configuring_again_replaces_what_was() -> None:
    first = configured("text")
    second = configured("json")
    log.info("once")
    assert lines(first) == []
    assert len(lines(second)) == 1
