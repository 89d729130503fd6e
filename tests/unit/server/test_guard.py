"""The guard and the connection in front of an echo application, spoken to over raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from longctx.server.connection import MAX_PIPELINED, connection_class
from longctx.server.errors import ApiError
from longctx.server.guard import Guard, take_body
from longctx.server.metrics import Metrics
from longctx.server.settings import ServerSettings
from longctx.server.tenant import tenant_of

KEY = "sk-test-0123456789"
LIMIT = 100_000


@dataclass
class Echo:
    """A running server; `seen` has what each route was given."""

    port: int
    seen: list[Any]

    def ask(self, data: bytes, *, timeout: float = 20.0, half_close: bool = False) -> bytes:
        """Send raw bytes and read until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout) as sock:
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
            return read_all(sock)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20, trust_env=False, **options)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(65536):
            data += chunk
    return data


def read_error(sock: socket.socket, data: bytes = b"") -> bytes:
    """One JSON error, `data` of which has arrived, from a connection that may stay open behind it."""
    sock.settimeout(20)
    while not data.endswith(b"}}"):
        chunk = sock.recv(65536)
        assert chunk, data
        data += chunk
    return data


def make_app(settings: ServerSettings, seen: list[Any]) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None)

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, Any]:
        state = request.scope["state"]
        body = await take_body(request)
        seen.append({"size": len(body), "kept": "body" in state, **{k: state[k] for k in ("tenant", "request_id")}})
        return seen[-1]

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.get("/slow")
    async def slow() -> str:
        await asyncio.sleep(1.0)
        return "done"

    @app.get("/boom")
    async def boom() -> None:
        raise RuntimeError("a secret detail")

    @app.get("/late-boom")
    async def late_boom() -> StreamingResponse:
        async def parts() -> Any:
            yield b"begun"
            raise RuntimeError("a secret detail")

        return StreamingResponse(parts())

    @app.get("/refused")
    async def refused() -> None:
        raise ApiError.from_code("queue_full", "full", retry_after_s=7)

    @app.get("/gone")
    async def gone(request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        seen.append("gone")

    app.add_middleware(Guard, settings=settings, metrics=Metrics())
    return app


@contextlib.contextmanager
def serving(head_timeout_s: float = 20.0, **options: Any) -> Iterator[Echo]:
    settings = ServerSettings(**{"max_body_bytes": LIMIT, "max_header_bytes": 8192, **options})
    seen: list[Any] = []
    sock = socket.create_server(("127.0.0.1", 0))
    http = connection_class(settings.max_header_bytes, head_timeout_s)
    server = uvicorn.Server(
        uvicorn.Config(make_app(settings, seen), http=http, ws="none", log_config=None, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield Echo(sock.getsockname()[1], seen)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    with serving() as server:
        yield server


def head(method: str = "POST", path: str = "/echo", *, close: bool = True, **headers: Any) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *(["Connection: close"] if close else [])]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def parse(answer: bytes) -> tuple[int, dict[str, str], Any]:
    """(status, headers, JSON) of one answer with a content length."""
    top, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(first.split()[1]), headers, json.loads(body[: int(headers["content-length"])])


def error_of(answer: bytes) -> tuple[int, str]:
    status, _, body = parse(answer)
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return status, error["code"]


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


# -- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 70_000, LIMIT])
def test_a_body_arrives_whole_and_only_once(echo: Echo, size: int) -> None:
    with echo.client() as client:
        answer = client.post("/echo", content=b"x" * size).json()
    assert answer["size"] == size and not answer["kept"]


def test_a_body_one_byte_too_large_is_refused_before_it_is_sent(echo: Echo) -> None:
    answer = echo.ask(head(Content_Length=LIMIT + 1, Expect="100-continue"))
    assert error_of(answer) == (413, "body_too_large")
    assert b"100 Continue" not in answer


def test_a_body_that_grows_too_large_is_refused(echo: Echo) -> None:
    """No Content-Length at all: only counting helps. The client must be able to read the answer."""
    chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
    answer = echo.ask(head(Transfer_Encoding="chunked") + chunk * 40 + b"0\r\n\r\n")
    assert error_of(answer) == (413, "body_too_large")


def test_a_client_that_is_still_sending_can_read_its_refusal(echo: Echo) -> None:
    """Closing on unread bytes would reset the connection and take the answer along."""
    body = b"x" * 20_000_000
    for data in (
        head(Content_Length=len(body)) + body,
        head(Transfer_Encoding="chunked") + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n",
    ):
        assert error_of(echo.ask(data)) == (413, "body_too_large")


def test_a_declared_length_that_is_no_number_is_refused(echo: Echo) -> None:
    for length in ("-1", "1e3", "0x10", "99999999999999999999999999", "5, 6"):
        assert error_of(echo.ask(head(Content_Length=length) + b"12345"))[0] in (400, 413), length


def test_two_lengths_are_refused(echo: Echo) -> None:
    """Request smuggling: a front end may believe the other one."""
    both = head(Content_Length=3, Transfer_Encoding="chunked") + b"3\r\nabc\r\n0\r\n\r\n"
    assert error_of(echo.ask(both)) == (400, "invalid_http")


def test_a_body_shorter_than_declared_ends_with_the_connection(echo: Echo) -> None:
    before = len(echo.seen)
    assert echo.ask(head(Content_Length=100) + b"short", half_close=True) == b""
    assert len(echo.seen) == before


def test_a_slow_body_is_refused_in_time() -> None:
    with serving(body_timeout_s=0.3) as echo, socket.create_connection(("127.0.0.1", echo.port), 20) as sock:
        sock.sendall(head(Content_Length=1000) + b"x")
        began = time.monotonic()
        assert error_of(read_all(sock)) == (408, "body_timeout")
        assert time.monotonic() - began > 0.2


def test_a_body_that_trickles_is_refused_though_it_never_pauses() -> None:
    with serving(body_timeout_s=0.5) as echo, socket.create_connection(("127.0.0.1", echo.port), 20) as sock:
        sock.sendall(head(Content_Length=1000))
        sock.settimeout(0.05)
        answer, until = b"", time.monotonic() + 15
        while not answer and time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                answer = sock.recv(65536)
            if not answer:
                sock.sendall(b"x")
        assert error_of(read_error(sock, answer)) == (408, "body_timeout")


def test_too_many_bodies_at_once_are_refused() -> None:
    with serving() as echo, contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", echo.port), 20)) for _ in range(5)]
        for sock in held:
            sock.sendall(head(Content_Length=LIMIT) + b"x" * (LIMIT - 1000))
        # One of the five made it too much; when it is gone, there is room again.
        until = time.monotonic() + 20
        answers: list[bytes] = []
        for sock in held:
            sock.settimeout(0.2)
        while not answers and time.monotonic() < until:
            for sock in held:
                with contextlib.suppress(TimeoutError):
                    answers.append(read_error(sock, sock.recv(65536)))
        assert error_of(answers[0]) == (503, "server_busy")
        with echo.client() as client:
            assert client.post("/echo", content=b"small").status_code == 200


# -- heads -----------------------------------------------------------------------------------------------------------


def test_large_headers_are_refused(echo: Echo) -> None:
    assert error_of(echo.ask(head(X_Big="x" * 9000))) == (431, "headers_too_large")
    assert error_of(echo.ask(head(**{f"X_{i}": i for i in range(900)}))) == (431, "headers_too_large")
    assert error_of(echo.ask(head("GET", "/health?" + "q" * 9000))) == (431, "headers_too_large")


def test_headers_without_an_end_are_refused(echo: Echo) -> None:
    with socket.create_connection(("127.0.0.1", echo.port), 20) as sock:
        sock.sendall(b"POST /echo HTTP/1.1\r\nX-Endless: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(10_000):
                sock.sendall(b"x" * 1000)
        with contextlib.suppress(ConnectionResetError):
            assert b"431" in read_all(sock)[:20]


def test_slow_headers_are_refused_and_silence_is_ended() -> None:
    with serving(head_timeout_s=0.3) as echo:
        assert error_of(echo.ask(b"POST /echo HTTP/1.1\r\nHost: local")) == (408, "headers_timeout")
        assert echo.ask(b"") == b""
        with echo.client() as client:
            assert client.post("/echo", content=b"ok").status_code == 200
            time.sleep(0.5)
            assert client.post("/echo", content=b"ok").status_code == 200
            # What counts is the time of the head, not of the answer.
            assert client.get("/slow").json() == client.get("/slow").json() == "done"


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
    ],
)
def test_what_is_no_http_is_a_400(echo: Echo, data: bytes) -> None:
    assert error_of(echo.ask(data)) == (400, "invalid_http")


def test_pipelined_requests_are_answered_in_order(echo: Echo) -> None:
    requests = b"".join(head(close=False, Content_Length=i) + b"x" * i for i in range(1, 4))
    answer = echo.ask(requests + head(Content_Length=4) + b"xxxx")
    assert [part.split(b",")[0] for part in answer.split(b'"size":')[1:]] == [b"1", b"2", b"3", b"4"]


def test_a_client_that_pipelines_and_leaves_is_noticed() -> None:
    """While a request waits behind another, the connection's end must still be seen."""
    with serving() as echo:
        with socket.create_connection(("127.0.0.1", echo.port), 20) as sock:
            sock.sendall(head("GET", "/gone", close=False) + head("GET", "/gone", close=False))
            time.sleep(0.2)
        wait_for(lambda: "gone" in echo.seen)
        with socket.create_connection(("127.0.0.1", echo.port), 20) as sock:
            sock.sendall(head("GET", "/gone", close=False) * (MAX_PIPELINED + 3))
            assert read_all(sock) == b""


@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
def test_a_client_that_leaves_is_noticed(how: str) -> None:
    with serving() as echo:
        sock = socket.create_connection(("127.0.0.1", echo.port), 20)
        sock.sendall(head("GET", "/gone"))
        time.sleep(0.1)
        if how == "half-close":
            sock.shutdown(socket.SHUT_WR)
        elif how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        else:
            sock.close()
        wait_for(lambda: "gone" in echo.seen)
        sock.close()


# -- errors ----------------------------------------------------------------------------------------------------------


def test_an_exception_is_a_json_500_without_a_traceback(echo: Echo) -> None:
    with echo.client() as client:
        answer = client.get("/boom")
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text and "Traceback" not in answer.text


def test_an_exception_after_the_head_cuts_the_connection(echo: Echo) -> None:
    """The client must see that the answer is not whole."""
    with echo.client() as client, pytest.raises(httpx.RemoteProtocolError):
        client.get("/late-boom")


def test_errors_have_their_headers(echo: Echo) -> None:
    with echo.client() as client:
        answer = client.get("/refused", headers={"X-Client-Request-Id": "mine"})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
    assert len(answer.headers["x-request-id"]) == 24


def test_head_is_get_without_its_body(echo: Echo) -> None:
    with echo.client() as client:
        answer = client.head("/health")
        assert answer.status_code == 200 and answer.content == b"" and int(answer.headers["content-length"]) > 0
        assert client.get("/health").text == '"ok"'


# -- who may ask -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed() -> Iterator[Echo]:
    with serving(api_keys=(KEY, "sk-other-0123456789")) as server:
        yield server


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        (KEY, "missing_api_key"),
        ("Basic " + KEY, "missing_api_key"),
        ("Bearer", "missing_api_key"),
        ("Bearer  ", "missing_api_key"),
        ("Bearer " + KEY[:-1], "invalid_api_key"),
        ("Bearer " + KEY + "0", "invalid_api_key"),
        ("Bearer " + KEY.upper(), "invalid_api_key"),
        ("Bearer \xff\xfe", "invalid_api_key"),
    ],
)
def test_a_wrong_key_is_a_401_before_the_body_is_read(keyed: Echo, authorization: str | None, code: str) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    answer = keyed.ask(head(Content_Length=50, Expect="100-continue", **headers))
    assert error_of(answer) == (401, code)
    assert b"100 Continue" not in answer
    assert parse(answer)[1]["www-authenticate"] == "Bearer"


def test_a_right_key_is_let_in_as_its_tenant(keyed: Echo) -> None:
    with keyed.client() as client:
        answers = [
            client.post("/echo", headers={"Authorization": f"{scheme} {key}"}).json()
            for scheme, key in (("Bearer", KEY), ("bearer", KEY), ("Bearer", "sk-other-0123456789"))
        ]
    assert [a["tenant"] for a in answers] == [tenant_of(KEY), tenant_of(KEY), tenant_of("sk-other-0123456789")]


def test_health_needs_no_key(keyed: Echo) -> None:
    with keyed.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/health/../echo").status_code in (401, 404)
        assert client.get("//health").status_code in (401, 404)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://localhost", 200),
        ("https://good.example", 200),
        ("https://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("null", 403),
    ],
)
def test_pages_of_other_sites_cannot_post(origin: str | None, status: int) -> None:
    with serving(cors_origins=("https://good.example",)) as echo, echo.client() as client:
        headers = {"Host": "localhost", **({} if origin is None else {"Origin": origin})}
        assert client.post("/echo", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("app.localhost", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:80", 403),
        ("[::1", 403),
    ],
)
def test_a_name_made_to_point_here_is_refused(echo: Echo, host: str, status: int) -> None:
    """DNS rebinding: a page's own name resolves to this machine, and its requests are of the same origin."""
    with echo.client() as client:
        assert client.post("/echo", headers={"Host": host}).status_code == status


def test_with_keys_any_name_will_do(keyed: Echo) -> None:
    with keyed.client() as client:
        headers = {"Host": "llm.example", "Authorization": f"Bearer {KEY}"}
        assert client.post("/echo", headers=headers).status_code == 200
