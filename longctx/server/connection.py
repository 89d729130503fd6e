"""One client's connection: limits on its headers before there is a request, and notice of a peer that is gone."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from longctx.server.errors import ApiError

MAX_PIPELINED = 8
"""Requests a client may send ahead of their answers."""

KEEP_ALIVE_PROBES = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
"""A peer whose machine vanished is noticed after a minute, even while a long prefill has nothing to send."""


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with what it leaves out.

    Headers may have `max_header_bytes` and take `head_timeout_s`, counted before they are parsed: the parser would
    gather them without end. Its own refusals are JSON. The end of the connection is seen while pipelined requests
    wait, and told to the one that is being answered.
    """

    max_header_bytes = 32 * 2**10
    head_timeout_s = 20.0

    _head_bytes: int | None = 0
    _head_timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEP_ALIVE_PROBES:
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            if self._head_timer is None:
                self._await_head()
            self._head_bytes += len(data)
        super().data_received(data)
        # A head that is complete by now is measured by the guard, exactly.
        if self._head_bytes is not None and self._head_bytes > self.max_header_bytes:
            message = f"the headers have more than {self.max_header_bytes:,} bytes"
            self._refuse(ApiError(431, message, code="headers_too_large"))

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        self._stop_timer()
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()
            if len(self.pipeline) > MAX_PIPELINED:
                self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not a valid HTTP request", code="invalid_http"))

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if self._head_bytes:
            self._refuse(ApiError(408, "the headers came too slowly", code="headers_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer outside of any request and close."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # An answer is under way: nothing may be written into it.
            self.transport.close()
            return
        body = json.dumps(error.body()).encode()
        head = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"connection: close\r\n\r\n",
        ]
        self.transport.write(b"".join([*head, body]))
        self.transport.close()


def connection_class(max_header_bytes: int, head_timeout_s: float) -> type[Connection]:
    """The protocol with these limits; uvicorn makes one object of it per connection."""
    limits: dict[str, Any] = {"max_header_bytes": max_header_bytes, "head_timeout_s": head_timeout_s}
    return type("Connection", (Connection,), limits)
