"""Stands before every route: who may ask, how large and how slow a body may be, and errors in one shape."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longctx.server import logs
from longctx.server.errors import ApiError
from longctx.server.metrics import Metrics
from longctx.server.settings import ServerSettings
from longctx.server.startup import is_loopback
from longctx.server.tenant import Tenants
from longctx.units import format_bytes

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/favicon.ico", "/health", "/ready", "/openapi.json"})
"""What needs no API key: whether the server lives, and the page that asks for one."""

SLOWEST_BODY_BYTES_PER_S = 16 * 1024
"""A body whose average falls below this, after a first `body_timeout_s`, is one that holds a connection on purpose."""

BODIES_AT_ONCE = 4
"""All bodies being read together may take this many times the limit of one."""

LINGER_S, SHORT_LINGER_S = 10.0, 1.0
"""After a refusal the rest of a body that is being sent is read and dropped for so long: closing on unread bytes would
reset the connection, and take the answer with it before the client has read it. A body that was too slow has less."""

_CLIENT_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

Headers = Sequence[tuple[bytes, bytes]]


class Guard:
    """ASGI middleware. Puts into the scope's state: `request_id`, `client_request_id`, `tenant` and `body`.

    A body is read whole before the route runs, so routes never wait for a slow client; `take_body` hands it over.
    Every answer has the header X-Request-Id. An exception becomes a JSON error without a traceback, or, if the answer
    has begun, a closed connection.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics):
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._tenants = Tenants(settings.api_keys)
        self._buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        state = scope.setdefault("state", {})
        request_id = state["request_id"] = new_request_id()
        state["client_request_id"] = _client_id(_header(scope["headers"], b"x-client-request-id"))
        logs.request_id.set(request_id)
        answer, method = Answer(send, request_id), scope["method"]
        if method == "HEAD":
            # Routes need not know it: the server below leaves the body out.
            scope = {**scope, "method": "GET"}
        try:
            await self._pass(scope, receive, answer)
        finally:
            route = getattr(scope.get("route"), "path", None)
            seconds = time.perf_counter() - started_s
            self._metrics.observe_http(method, route, answer.status or 499, seconds)

    async def _pass(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        body = None
        try:
            self._check_head(scope)
            scope["state"]["tenant"] = self._authenticate(scope)
            body = await self._read_body(scope["headers"], receive)
            if body is None:
                return  # the client left
            scope["state"]["body"] = body
            await self._app(scope, _replay(scope["state"], receive), answer.send)
        except ApiError as error:
            await answer.error(error)
            if body is None and _header(scope["headers"], b"expect") is None:
                await _drop_rest(receive, LINGER_S if error.status != 408 else SHORT_LINGER_S)
        except Exception:
            # Of an answer that has begun the rest is missing now, on which the connection is closed.
            log.exception("a request failed")
            if not answer.started:
                await answer.error(ApiError(500, "the server failed; its log says why", type="server_error"))
        await answer.finish()

    def _check_head(self, scope: Scope) -> None:
        headers: Headers = scope["headers"]
        most = self._settings.max_header_bytes
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in headers)
        if size > most:
            raise ApiError(431, f"the headers have {size:,} bytes, more than {most:,}", code="headers_too_large")
        self._check_origin(scope["method"], headers)

    def _check_origin(self, method: str, headers: Headers) -> None:
        """Keep other sites' pages from using the server through their visitor's browser.

        A page of another origin can send a POST without being able to read its answer; one whose name was made to point
        here can do both, but not to a server that knows its own names.
        """
        host, origin = _header(headers, b"host") or "", _header(headers, b"origin")
        listens_locally = is_loopback(self._settings.host) and not self._tenants.required
        if listens_locally and host and not _is_own_name(host, self._settings.host):
            raise ApiError(
                403,
                "this server answers only to its own address; give it --api-key-file to use it under another name",
                code="host_not_allowed",
            )
        if method in ("GET", "HEAD", "OPTIONS") or origin is None:
            return
        allowed = self._settings.cors_origins
        if "*" not in allowed and origin not in allowed and urlsplit(origin).netloc.lower() != host.lower():
            raise ApiError(
                403, "requests from this origin are not allowed; see --cors-origin", code="origin_not_allowed"
            )

    def _authenticate(self, scope: Scope) -> str | None:
        if not self._tenants.required or scope["path"] in OPEN_PATHS:
            return None
        scheme, _, key = (_header(scope["headers"], b"authorization") or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(
                401, "an API key is required: send it as the header Authorization: Bearer KEY", code="missing_api_key"
            )
        tenant = self._tenants.find(key.strip())
        if tenant is None:
            raise ApiError(401, "this API key is not known", code="invalid_api_key")
        return tenant

    async def _read_body(self, headers: Headers, receive: Receive) -> bytearray | None:
        """The whole body, or None if the client left; 413 for one that is too large, 408 for one that is too slow."""
        most, patience_s = self._settings.max_body_bytes, self._settings.body_timeout_s
        declared = _header(headers, b"content-length")
        if declared is None and _header(headers, b"transfer-encoding") is None:
            return bytearray()
        if declared is not None and declared.isdecimal() and int(declared) > most:
            raise _too_large(most, int(declared))
        body, begun_s, complete = bytearray(), time.monotonic(), False
        try:
            while not complete:
                left_s = begun_s + patience_s + len(body) / SLOWEST_BODY_BYTES_PER_S - time.monotonic()
                async with asyncio.timeout(min(patience_s, left_s)):
                    message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                chunk = message.get("body", b"")
                body += chunk
                self._buffered += len(chunk)
                self._check_size(len(body))
                complete = not message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, f"the body came too slowly: {len(body):,} bytes so far", code="body_timeout") from None
        finally:
            self._buffered -= len(body)
        return body

    def _check_size(self, size: int) -> None:
        most = self._settings.max_body_bytes
        if size > most:
            raise _too_large(most)
        if self._buffered > BODIES_AT_ONCE * most:
            raise ApiError(
                503, "too many large bodies at once", type="server_error", code="server_busy", retry_after_s=2.0
            )


class Answer:
    """What goes back: adds the request's id, remembers what was sent."""

    def __init__(self, send: Send, request_id: str):
        self._send = send
        self._headers = [(b"x-request-id", request_id.encode())]
        self._open_ended = False
        self.status: int | None = None
        self.finished = False

    @property
    def started(self) -> bool:
        return self.status is not None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        elif message["type"] == "http.response.body":
            self.finished = not message.get("more_body", False)
        await self._send(message)

    async def error(self, error: ApiError) -> None:
        """Send `error` and close the connection after `finish`: what else comes over it cannot be trusted to begin at
        a request."""
        if self.started:
            return
        body = json.dumps(error.body()).encode()
        extra = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        headers = [(name.encode(), value.encode()) for name, value in {**error.headers(), **extra}.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": True})
        self._open_ended = True

    async def finish(self) -> None:
        if self._open_ended and not self.finished:
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})


def new_request_id() -> str:
    return uuid.uuid4().hex[:24]


def _is_own_name(host: str, bound_to: str) -> bool:
    """An address, localhost, or the name given with --host: no foreign site can be called so."""
    name = (urlsplit(f"//{host}").hostname or "") if "]" in host or host.count(":") < 2 else host
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", bound_to.lower()) or name.endswith(".localhost")
    return True


def _too_large(most: int, size: int | None = None) -> ApiError:
    have = f"the body has {size:,} bytes, more than" if size is not None else "the body is larger than"
    return ApiError(413, f"{have} the limit of {most:,} ({format_bytes(most)}); see --max-body", code="body_too_large")


def _header(headers: Headers, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in headers if key == name), None)


def _client_id(value: str | None) -> str | None:
    return value if value is not None and _CLIENT_ID.fullmatch(value) else None


async def take_body(request: Request) -> bytes | bytearray:
    """The request's body, once: a route that takes it holds the only reference, and may drop megabytes early."""
    body = request.scope["state"].pop("body", None)
    return body if body is not None else await request.body()


def _replay(state: dict[str, Any], receive: Receive) -> Callable[[], Awaitable[Message]]:
    """A `receive` that gives the body that was read, if nobody took it, then what comes after it."""
    begun = False

    async def replay() -> Message:
        nonlocal begun
        if begun:
            return await receive()
        begun = True
        return {"type": "http.request", "body": state.pop("body", b""), "more_body": False}

    return replay


async def _drop_rest(receive: Receive, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass
    except TimeoutError:
        pass
