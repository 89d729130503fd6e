"""Streams as other clients see them: curl, httpx, and sockets that close halfway."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.server import LiveServer, save_tiny, words

pytestmark = pytest.mark.slow  # a server takes its seconds to start

POSITIONS = 16_384
LONG = {"prompt": words(4000), "max_tokens": POSITIONS // 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("streams")
    save_tiny(folder / "tiny", max_position_embeddings=POSITIONS)
    # One at a time: whoever comes second waits, and says so.
    with LiveServer(folder / "tiny", "--ping-seconds", "0.2", "--max-running", "1", cache=folder / "cache") as live:
        yield live
        assert "Traceback" not in live.stderr


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
    return value


def latest(server: LiveServer) -> dict[str, Any]:
    with server.client() as http:
        data = http.get("/v1/requests").json()["data"]
    return dict(data[0]) if data else {}


# -- curl ------------------------------------------------------------------------------------------------------------


def curl(server: LiveServer, body: dict[str, Any], *flags: str, path: str = "/v1/completions") -> str:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["curl", "--silent", "--show-error", "--max-time", "60", *flags, f"{server.url}{path}"]
    result = subprocess.run(
        [*command, "-H", "Content-Type: application/json", "-d", json.dumps(body)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_curl(server: LiveServer) -> None:
    whole = json.loads(curl(server, {"prompt": "the key", "max_tokens": 4, "temperature": 0}))
    stream = curl(server, {"prompt": "the key", "max_tokens": 4, "temperature": 0, "stream": True}, "--no-buffer")
    blocks = stream.removesuffix("\n\n").split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks[:-1] if not block.startswith(":")]
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == whole["choices"][0]["text"]
    assert "HTTP/1.1 400" in curl(server, {"prompt": ""}, "--include")


def test_curl_of_a_response(server: LiveServer) -> None:
    stream = curl(server, {"input": "the key", "max_output_tokens": 4, "stream": True}, "-N", path="/v1/responses")
    blocks = [block.split("\n") for block in stream.removesuffix("\n\n").split("\n\n") if not block.startswith(":")]
    for name, data in blocks:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert blocks[-1][0] in ("event: response.completed", "event: response.incomplete")


# -- httpx -----------------------------------------------------------------------------------------------------------


def test_the_head_and_pings_come_before_the_first_token(server: LiveServer) -> None:
    """ggml-org/llama.cpp#24013, antirez/ds4#151: nothing was sent, not even headers, until the prompt was read."""
    with server.client() as http, http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as first:
        running = first.iter_lines()
        next(running)  # it runs now, and the next one waits
        body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True, "stream": True, "return_progress": True}
        with server.client(timeout=3) as other, other.stream("POST", "/v1/completions", json=body) as second:
            assert second.status_code == 200, "while it has not begun"
            lines = iter(second.iter_lines())
            seen = []
            while seen.count(": ping") < 3:
                seen.append(next(lines))
            data = [json.loads(line[6:]) for line in seen if line.startswith("data: ")]
            assert {d["prompt_progress"]["stage"] for d in data} == {"queued"}
            assert data[-1]["prompt_progress"]["queue_position"] == 1
            first.close()
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert all(line == ": ping" or line.startswith("data: ") for line in [*filter(None, seen), *rest])


def test_progress_is_what_was_computed(server: LiveServer) -> None:
    body = {"prompt": words(4500, seed=3), "max_tokens": 1, "stream": True, "return_progress": True}
    with server.client() as http:
        lines = http.post("/v1/completions", json=body).text.split("\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    processed = [p["processed"] for p in progress]
    assert processed == sorted(processed) and processed[-1] == progress[-1]["total"]
    assert len(set(processed)) > 3 and progress[-1]["total"] == chunks[-1]["usage"]["prompt_tokens"]
    assert any(p["eta_ms"] for p in progress)
    times = [p["time_ms"] for p in progress]
    assert times == sorted(times)


# -- sockets ---------------------------------------------------------------------------------------------------------


def post(server: LiveServer, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


LEAVING: dict[str, Callable[[socket.socket], None]] = {
    "close": socket.socket.close,
    "half-close": lambda sock: sock.shutdown(socket.SHUT_WR),
    "reset": reset,
}


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["queued", "prefill", "decode"])
def test_whoever_leaves_frees_the_only_place(server: LiveServer, how: str, stream: bool, stage: str) -> None:
    """antirez/ds4#333, lemonade-sdk/lemonade#3133, Neroued/ninfer#111: computing on for a client that has left."""
    blocker = post(server, {**LONG, "stream": True}) if stage == "queued" else None
    if blocker is not None:
        until(lambda: latest(server).get("stage") in ("prefill", "decode"))
    sock = post(server, {**LONG, "stream": stream, "cache_salt": f"{how}{stream}{stage}"})
    reached = (stage, "decode") if stage == "prefill" else (stage,)  # a short prefill may be over by now
    id = until(lambda: (r := latest(server)).get("stage") in reached and r["id"])
    LEAVING[how](sock)
    with server.client() as http:
        until(lambda: http.get(f"/v1/requests/{id}").json()["finish_reason"] == "cancelled")
        if blocker is not None:
            blocker.close()
        probe = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert probe.status_code == 200
    sock.close()


def test_a_reader_that_is_slow_gets_everything(server: LiveServer) -> None:
    body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    with server.client() as http:
        whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    sock = post(server, {**body, "stream": True})
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    time.sleep(2)
    received = b""
    while b"data: [DONE]" not in received:
        data = sock.recv(65536)
        assert data, "the stream was cut"
        received += data
    sock.close()
    # Every event is a chunk of the transfer of its own, so its line is whole.
    lines = [line.strip() for line in received.decode().split("\n")]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == whole
