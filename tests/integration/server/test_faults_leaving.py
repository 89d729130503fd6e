"""Faults of other servers on clients that leave, in every way a client can, or do not read."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from typing import Any

import pytest

from tests.helpers.server import (
    LiveServer,
    raw_request,
    until,
)
from tests.helpers.tiny import random_ids

# A server takes its seconds to start.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]

LONG = 40_000
"""Tokens of a prompt that takes seconds to read."""


# -- B116: clients that leave ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "half-close", "reset", "delete"])
def test_b116_when_the_client_leaves_the_work_stops(live: LiveServer, how: str, stream: bool) -> None:
    """ai-dynamo/dynamo#7489: the server notices only when it writes, computes on and holds the only slot."""
    prompt = random_ids(LONG, seed=hash((how, stream)) % 1000)
    body = json.dumps({"prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "stream": stream}).encode()
    name = f"leaver-{how}-{stream}"
    with live.client() as client, socket.create_connection(("127.0.0.1", live.port), 60) as sock:
        sock.sendall(raw_request("/v1/completions", body, X_Client_Request_Id=name))

        def record() -> dict[str, Any]:
            answer = client.get(f"/v1/requests/{name}")
            return dict(answer.json()) if answer.status_code == 200 else {"processed": 0, "stage": "none"}

        until(lambda: record()["processed"] > 0.1 * LONG)
        processed = record()["processed"]
        if how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "half-close":
            sock.shutdown(socket.SHUT_WR)
        elif how == "delete":
            assert client.delete(f"/v1/requests/{name}").json()["cancelled"]
        else:
            sock.close()
        until(lambda: record()["stage"] == "finished")
        end = record()
        assert end["finish_reason"] == "cancelled"
        # Two chunks, and what was computed between the look and the leaving.
        assert end["usage"]["computed_tokens"] < min(LONG, processed + 2 * 2048 + 0.3 * LONG), (processed, end)
        began = time.monotonic()
        assert client.post("/v1/completions", json={"prompt": "probe", "max_tokens": 1}).status_code == 200
        assert time.monotonic() - began < 5


def test_b116_a_reader_that_does_not_read_holds_nobody_up(live: LiveServer) -> None:
    """Its tokens wait for it; the engine and the other clients do not."""
    body = json.dumps(
        {"prompt": "the key", "max_tokens": 2500, "ignore_eos": True, "stream": True, "logprobs": 20}
    ).encode()
    with live.client() as client, contextlib.ExitStack() as stack:
        for _ in range(2):
            sock = socket.socket()
            stack.enter_context(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(60)
            sock.connect(("127.0.0.1", live.port))
            sock.sendall(raw_request("/v1/completions", body))
        until(lambda: client.get("/health").json()["running_requests"] == 2)
        for _ in range(5):
            began = time.monotonic()
            assert client.post("/v1/completions", json={"prompt": "probe", "max_tokens": 1}).status_code == 200
            assert time.monotonic() - began < 10
        until(lambda: client.get("/health").json()["running_requests"] == 0, 120)
