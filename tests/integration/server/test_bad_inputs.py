"""Bad inputs against a live server: each gets a clear refusal in one shape, and nobody notices."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.server import LiveServer, idle, raw_request, until

pytestmark = pytest.mark.slow  # a server takes its seconds to start

C, H, R, T, D, P, J = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/v1/plan",
    "/v1/jobs",
)
CHAT = [{"role": "user", "content": "hi"}]
SURROGATE = b'"\\ud800"'


def obj(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


BODIES: list[tuple[str, str, bytes, int]] = [
    # JSON itself
    ("empty", C, b"", 400),
    ("spaces", C, b" \n\t ", 400),
    ("no json", C, b"prompt=hello", 400),
    ("cut off", C, b'{"prompt": "a', 400),
    ("trailing", C, b'{"prompt": "a"} x', 400),
    ("single quotes", C, b"{'prompt': 'a'}", 400),
    ("comment", C, b'{"prompt": "a" /* b */}', 400),
    ("list", C, b'["a"]', 400),
    ("string", C, b'"a"', 400),
    ("null", C, b"null", 400),
    ("number", C, b"17", 400),
    ("NaN", C, b'{"prompt": "a", "temperature": NaN}', 400),
    ("Infinity", C, b'{"prompt": "a", "temperature": Infinity}', 400),
    ("1e999", C, b'{"prompt": "a", "temperature": 1e999}', 400),
    ("bom", C, b'\xef\xbb\xbf{"prompt": 1}', 400),
    ("utf-16", C, '{"prompt": "a"}'.encode("utf-16"), 400),
    ("bad utf-8", C, b'{"prompt": "\xff\xfe"}', 400),
    ("lone surrogate", C, b'{"prompt": ' + SURROGATE + b"}", 400),
    ("lone surrogate in a name", C, b'{"prompt": "a", ' + SURROGATE + b": 1}", 400),
    ("control character", C, b'{"prompt": "a\x01"}', 400),
    ("deep", C, b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
    ("deep objects", H, b'{"messages": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", 400),
    ("gzip", C, b"\x1f\x8b\x08\x00\x00\x00\x00\x00", 400),
    # names and types
    ("unknown field", C, obj(prompt="a", max_new_tokens=5), 400),
    ("wrong case", C, obj(Prompt="a"), 400),
    ("no prompt", C, obj(max_tokens=5), 400),
    ("null prompt", C, obj(prompt=None), 400),
    ("empty prompt", C, obj(prompt=""), 400),
    ("empty list", C, obj(prompt=[]), 400),
    ("empty lists", C, obj(prompt=[[]]), 400),
    ("an empty prompt among others", C, obj(prompt=["a", ""]), 400),
    ("mixed prompts", C, obj(prompt=["a", [1]]), 400),
    ("floats as ids", C, obj(prompt=[1.5]), 400),
    ("booleans as ids", C, obj(prompt=[True]), 400),
    ("negative id", C, obj(prompt=[-1]), 400),
    ("id beyond the vocabulary", C, obj(prompt=[320]), 400),
    ("id beyond int64", C, obj(prompt=[2**70]), 400),
    ("object prompt", C, obj(prompt={"text": "a"}), 400),
    ("other model", C, obj(prompt="a", model="gpt-4"), 404),
    ("a path as model", C, obj(prompt="a", model="../../etc/passwd"), 404),
    ("model number", C, obj(prompt="a", model=4), 400),
    ("stream text", C, obj(prompt="a", stream="yes"), 400),
    ("stream options number", C, obj(prompt="a", stream=True, stream_options=1), 400),
    # ranges
    ("max_tokens 0", C, obj(prompt="a", max_tokens=0), 400),
    ("max_tokens negative", C, obj(prompt="a", max_tokens=-1), 400),
    ("max_tokens text", C, obj(prompt="a", max_tokens="10"), 400),
    ("max_tokens float", C, obj(prompt="a", max_tokens=1.5), 400),
    ("max_tokens huge", C, obj(prompt="a", max_tokens=10**30), 400),
    ("temperature negative", C, obj(prompt="a", temperature=-0.1), 400),
    ("temperature huge", C, obj(prompt="a", temperature=1e9), 400),
    ("temperature list", C, obj(prompt="a", temperature=[1]), 400),
    ("top_p 0", C, obj(prompt="a", top_p=0), 400),
    ("top_p 2", C, obj(prompt="a", top_p=2), 400),
    ("top_k negative", C, obj(prompt="a", top_k=-5), 400),
    ("min_p 2", C, obj(prompt="a", min_p=2), 400),
    ("n 0", C, obj(prompt="a", n=0), 400),
    ("n huge", C, obj(prompt="a", n=100_000), 400),
    ("penalty huge", C, obj(prompt="a", presence_penalty=99), 400),
    ("penalty text", C, obj(prompt="a", frequency_penalty="x"), 400),
    ("repetition 0", C, obj(prompt="a", repetition_penalty=0), 400),
    ("bias of no token", C, obj(prompt="a", logit_bias={"x": 1}), 400),
    ("bias beyond the vocabulary", C, obj(prompt="a", logit_bias={"9999": 1}), 400),
    ("bias huge", C, obj(prompt="a", logit_bias={"5": 1e9}), 400),
    ("bias list", C, obj(prompt="a", logit_bias=[1]), 400),
    ("seed text", C, obj(prompt="a", seed="x"), 400),
    ("seed huge", C, obj(prompt="a", seed=2**80), 400),
    ("stop number", C, obj(prompt="a", stop=5), 400),
    ("stop empty", C, obj(prompt="a", stop=""), 400),
    ("stop nested", C, obj(prompt="a", stop=[["a"]]), 400),
    ("logprobs true", C, obj(prompt="a", logprobs=True), 400),
    ("logprobs negative", C, obj(prompt="a", logprobs=-1), 400),
    ("timeout 0", C, obj(prompt="a", timeout_s=0), 400),
    ("timeout negative", C, obj(prompt="a", timeout_s=-5), 400),
    ("suffix", C, obj(prompt="a", suffix="b"), 400),
    ("salt number", C, obj(prompt="a", cache_salt=5), 400),
    # chats
    ("no messages", H, obj(model="tiny"), 400),
    ("empty messages", H, obj(messages=[]), 400),
    ("messages text", H, obj(messages="hi"), 400),
    ("message text", H, obj(messages=["hi"]), 400),
    ("no role", H, obj(messages=[{"content": "a"}]), 400),
    ("no content", H, obj(messages=[{"role": "user"}]), 400),
    ("unknown role", H, obj(messages=[{"role": "wizard", "content": "a"}]), 400),
    ("content number", H, obj(messages=[{"role": "user", "content": 5}]), 400),
    ("image", H, obj(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), 400),
    ("audio", H, obj(messages=CHAT, modalities=["audio"]), 400),
    ("json schema", H, obj(messages=CHAT, response_format={"type": "json_schema"}), 400),
    ("tools without a template for them", H, obj(messages=CHAT, tools=[{"type": "function"}]), 400),
    ("top_logprobs without logprobs", H, obj(messages=CHAT, top_logprobs=5), 400),
    ("top_logprobs huge", H, obj(messages=CHAT, logprobs=True, top_logprobs=5000), 400),
    # the others
    ("no input", R, obj(model="tiny"), 400),
    ("input number", R, obj(input=5), 400),
    ("previous response", R, obj(input="a", previous_response_id="resp_1"), 400),
    ("background", R, obj(input="a", background=True), 400),
    ("nothing to tokenize", T, obj(), 400),
    ("both to tokenize", T, obj(prompt="a", messages=CHAT), 400),
    ("tokens text", D, obj(tokens="a"), 400),
    ("tokens beyond", D, obj(tokens=[10**9]), 400),
    ("plan of nothing", P, obj(), 400),
    ("plan of 0", P, obj(tokens=0), 400),
    ("plan of text", P, obj(tokens="many"), 400),
    ("plan concurrency", P, obj(tokens=5, concurrency=0), 400),
    ("job of nothing", J, obj(), 400),
    ("job of an unknown endpoint", J, obj(endpoint="/v1/images", body={}), 400),
    ("job body text", J, obj(endpoint=C, body="x"), 400),
    ("job body wrong", J, obj(endpoint=C, body={"prompt": "a", "nonsense": 1}), 400),
    ("job ttl", J, obj(endpoint=C, body={"prompt": "a"}, ttl_s=-1), 400),
]


@pytest.fixture(scope="module", autouse=True)
def nobody_noticed(live: LiveServer) -> Iterator[None]:
    """After all of it the server is what it was, and its log has no traceback (`live` looks)."""
    assert len(BODIES) >= 60
    yield
    with live.client() as client:
        until(lambda: idle(client))
        health = client.get("/health").json()
        assert health["engine"] == "ready" and health["restarts"] == 0
        assert client.post(C, json={"prompt": "alive?", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(("path", "body", "status"), [case[1:] for case in BODIES], ids=[case[0] for case in BODIES])
def test_a_bad_body_is_refused_clearly(live: LiveServer, path: str, body: bytes, status: int) -> None:
    with live.client() as client:
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert 5 < len(error["message"]) < 1000 and "Traceback" not in answer.text and "pydantic" not in answer.text
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_is_the_same_for_a_stream(live: LiveServer, stream: bool) -> None:
    with live.client() as client:
        answer = client.post(C, json={"prompt": "a", "temperature": -1, "stream": stream})
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY"])
@pytest.mark.parametrize("path", [C, H, R, T, D, P])
def test_wrong_methods(live: LiveServer, method: str, path: str) -> None:
    with live.client() as client:
        answer = client.request(method, path)
    assert answer.status_code in (400, 405)
    if answer.status_code == 405:
        assert answer.headers["allow"] == "POST" and answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions/",
        "/v1//completions",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/v1/requests/%00",
        "/v1/requests/" + "a" * 5000,
        "/v1/jobs/'; DROP TABLE jobs; --",
        "/v1/jobs/%F0%9F%92%A9",
        "/v1/jobs/none/result",
        "/v1/jobs/none/stream",
        "/static/../page.py",
        "/favicon.ico",
    ],
)
def test_paths_that_lead_nowhere(live: LiveServer, path: str) -> None:
    with live.client() as client:
        answer = client.get(path)
    assert answer.status_code == 404 and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert "root:" not in answer.text


def ask(live: LiveServer, data: bytes, *, half_close: bool = False) -> bytes:
    with socket.create_connection(("127.0.0.1", live.port), 60) as sock:
        answer = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
            while chunk := sock.recv(65536):
                answer += chunk
        return answer


def test_heads_that_are_no_heads(live: LiveServer) -> None:
    assert b" 431 " in ask(live, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 40_000 + b"\r\n\r\n")[:20]
    assert b" 400 " in ask(live, b"\x16\x03\x01hello, are you TLS?\r\n\r\n")[:20]
    assert b" 403 " in ask(live, b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n")[:20]


def test_half_closed_and_abandoned_bodies(live: LiveServer) -> None:
    whole = raw_request(C, obj(prompt="the key", max_tokens=1))
    assert ask(live, whole[:-10], half_close=True) == b"", "a body that ends early is nobody's request"
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", live.port), 60) as sock:
            sock.sendall(whole[:-10])
    with socket.create_connection(("127.0.0.1", live.port), 60) as sock:
        for byte in whole:
            sock.sendall(bytes([byte]))
        assert b" 200 " in sock.recv(65536)[:20], "slow, but not too slow"
