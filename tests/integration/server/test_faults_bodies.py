"""Faults of other servers on bodies that are huge, malformed or extreme."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

import pytest

from tests.helpers.server import (
    LiveServer,
    all_rss_bytes,
)

# A server takes its seconds to start.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]

CAP = 64 * 2**20
"""The default limit of a body."""


# -- B119, B120: hostile bodies --------------------------------------------------------------------------------------


def send_slowly(server: LiveServer, head: bytes, piece: bytes, times: int) -> bytes:
    """Send as much as the server takes; its answer."""
    with socket.create_connection(("127.0.0.1", server.port), 60) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(head)
            for _ in range(times):
                sock.sendall(piece)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := sock.recv(65536):
                answer += chunk
        return answer


def test_b119_a_body_over_the_limit_costs_no_memory(live: LiveServer) -> None:
    """raullenchai/Rapid-MLX#706: no byte cap, so a body is read, parsed and kept whatever its size."""
    with live.client() as client:
        client.post("/v1/completions", json={"prompt": "warm " * 200_000})
    before = all_rss_bytes(live)
    mebibyte = b"x" * 2**20
    top = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    declared = send_slowly(live, top + b"Content-Length: 100000000\r\n\r\n", mebibyte, 100)
    assert b" 413 " in declared[:20]
    chunk = b"100000\r\n" + mebibyte + b"\r\n"
    absent = send_slowly(live, top + b"Transfer-Encoding: chunked\r\n\r\n", chunk, 100)
    assert b" 413 " in absent[:20]
    lying = send_slowly(live, top + b"Content-Length: 10\r\nConnection: close\r\n\r\n", mebibyte, 3)
    # Ten bytes are no JSON; what follows resets the connection, perhaps before the answer was read.
    assert lying == b"" or b" 400 " in lying[:20]
    assert len(declared) < 2000 and len(absent) < 2000
    assert all_rss_bytes(live) - before < 2 * CAP


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages":' + b'[{"role":' * 50_000,
        json.dumps({"messages": [{"role": 5, "content": "x" * 150} for _ in range(5000)]}).encode(),
        json.dumps({"prompt": ["\ud800" * 20] * 5000}).encode(),
        json.dumps({"messages": [{"role": "user", "content": [{"type": "no"}] * 5000}]}).encode(),
        json.dumps({f"field{i}": i for i in range(100_000)}).encode(),
        json.dumps({"prompt": "a", "x" * 1_000_000: 1}).encode(),
    ],
)
def test_b119_a_malformed_body_is_not_echoed(live: LiveServer, body: bytes) -> None:
    """vllm-project/vllm#49239: validation errors repeat their input, many times larger."""
    with live.client() as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/plan", "/v1/jobs"):
            answer = client.post(path, content=body)
            assert answer.status_code == 400, (path, answer.status_code)
            assert len(answer.content) < 10_000 and "x" * 150 not in answer.text


EXTREMES: dict[str, dict[str, Any]] = {
    "stop": {"stop": [f"s{i}" for i in range(500_000)]},
    "stop length": {"stop": "x" * 1_000_000},
    "n": {"n": 10**9},
    "n and prompts": {"prompt": ["a"] * 60, "n": 60},
    "prompts": {"prompt": ["a"] * 100_000},
    "logit_bias": {"logit_bias": {str(i): 1 for i in range(100_000)}},
    "logprobs": {"logprobs": 10**9},
    "best_of": {"best_of": 10**9},
    "max_tokens": {"max_tokens": 10**18},
    "user": {"cache_salt": "x" * 1_000_000},
}


@pytest.mark.parametrize("name", EXTREMES)
def test_b120_extreme_options_are_refused_at_once(live: LiveServer, name: str) -> None:
    """vllm-project/vllm#51447: half a million stop strings or a huge n burn time in every token.

    The bound is 100 ms on a quiet machine; the best of some tries is taken, ten times that on a busy one.
    """
    body = json.dumps({"prompt": "a", **EXTREMES[name]}).encode()
    took_s = []
    with live.client() as client:
        for _ in range(5):
            began = time.perf_counter()
            answer = client.post("/v1/completions", content=body)
            took_s.append(time.perf_counter() - began)
            assert answer.status_code == 400 and len(answer.content) < 10_000
    assert min(took_s) < 1.0
