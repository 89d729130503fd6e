"""A server's life: it listens while the model loads, serves, drains, ends, and leaves nobody behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.live_jobs import post, wait
from tests.helpers.server import LiveServer, save_tiny, until
from tests.helpers.streams import ENDLESS, Stream, assert_all_gone, tree
from tests.integration.server.conftest import POSITIONS

pytestmark = pytest.mark.slow  # a server takes its seconds to start

Start = Callable[..., LiveServer]


def test_a_whole_life(start: Start) -> None:
    """It listens while the model loads, says when it is ready, and when stopped lets what runs end.

    A terminal sends Ctrl-C to every process: the engine must not die of it while an answer is being drained.
    """
    server = start(wait=False)
    with server.client() as client:
        first = client.get("/ready")
        assert client.get("/health").status_code == 200
        if first.status_code == 503:  # it cannot be ready before its own imports are done
            assert first.json()["engine"] == "starting" and int(first.headers["retry-after"]) >= 1
        server.wait_ready()
        ready = client.get("/ready").json()
        assert ready["status"] == "ready" and ready["loading"] is None
    until(lambda: "longctx serves tiny at" in server.stderr)
    table = server.stderr.partition("longctx serves")[2]
    assert all(word in table for word in ("/v1/chat/completions", "formats", "memory", "tiers", "limits", "jobs"))
    pids = tree(server)
    assert len(pids) >= 3
    stream = Stream(server, max_tokens=2000)
    os.killpg(server.pid, signal.SIGINT)
    with server.client() as client:
        until(lambda: client.get("/ready").status_code == 503)
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "draining"
        assert client.get("/health").json()["draining"] is True
    events = stream.end()
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-2]["usage"] is None or events[-2]["usage"]["completion_tokens"] == 2000
    assert server.wait_end() == 0
    assert_all_gone(pids)
    assert "Traceback" not in server.stderr


def test_a_stop_cancels_what_takes_too_long(start: Start) -> None:
    server = start("--drain-seconds", "0.5")
    pids = tree(server)
    stream = Stream(server, max_tokens=60_000)
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 30
    events = stream.end()
    assert events[-1] == "[DONE]", "even then the stream ends as a stream does"
    assert_all_gone(pids)
    assert "Traceback" not in server.stderr


def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    server = start("--drain-seconds", "600")
    pids = tree(server)
    stream = Stream(server, max_tokens=60_000)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: "no new requests" in server.stderr)
    server.process.send_signal(signal.SIGINT)
    server.wait_end(30)
    stream.end()
    assert_all_gone(pids)


def test_a_signal_before_it_listens_ends_it(start: Start) -> None:
    """The server has not imported yet what it needs to answer, only the engine's process runs."""
    server = start(wait=False, listening=False)
    pids = until(lambda: len(found := tree(server)) >= 2 and found)
    assert server.stop() == 0
    assert_all_gone(pids)


def test_it_warns_when_anybody_may_reach_it_and_a_signal_ends_it_while_the_model_loads(start: Start) -> None:
    server = start("--host", "0.0.0.0", wait=False)
    pids = tree(server)
    until(lambda: "anyone who reaches" in server.stderr)
    with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: llm.example\r\nConnection: close\r\n\r\n")
        assert b" 200 " in sock.recv(65536)
    assert server.stop() == 0
    assert_all_gone(pids)


def test_jobs_do_not_hold_up_a_stop_and_are_there_again(start: Start, tmp_path: Path) -> None:
    """They are on disk: what has ended can be read while the model loads, what has not is run by the next server."""
    flags = ("--jobs-dir", str(tmp_path / "jobs"), "--drain-seconds", "300")
    server = start(*flags)
    with server.client() as client:
        done = post(client, prompt="a", max_tokens=1)["id"]
        wait(client, done, "completed")
        id = post(client, **{**ENDLESS, "stream": False, "max_tokens": 50_000})["id"]
        until(lambda: client.get(f"/v1/jobs/{id}").json()["status"] == "running")
    assert server.stop() == 0
    server = start(*flags, wait=False)
    with server.client() as client:
        answer = until(lambda: (a := client.get(f"/v1/jobs/{done}/result")).status_code == 200 and a)
        assert answer.json()["object"] == "text_completion"
        server.wait_ready()
        assert client.get(f"/v1/jobs/{id}").json()["status"] in ("queued", "running")
        client.delete(f"/v1/jobs/{id}")
    assert server.stop() == 0


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def optioned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A base model under another name, with a template, and a time limit."""
    root = tmp_path_factory.mktemp("options")
    (root / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    flags = ("--chat-template", str(root / "chat.jinja"), "--served-model-name", "mine", "--request-timeout", "2")
    base = save_tiny(root / "base", template=None, max_position_embeddings=POSITIONS)
    with LiveServer(base, *flags, cache=root / "cache") as live:
        yield live


def test_a_base_model_chats_with_a_template(optioned: LiveServer) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    with optioned.client() as client:
        assert client.post("/v1/chat/completions", json=chat).json()["model"] == "mine"


def test_the_servers_time_limit_ends_a_request(optioned: LiveServer) -> None:
    began = time.monotonic()
    events = Stream(optioned, max_tokens=60_000).end()
    assert 1.5 < time.monotonic() - began < 30
    assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "deadline_exceeded"
    with optioned.client() as client:
        answer = client.post("/v1/completions", json={**ENDLESS, "stream": False, "max_tokens": 60_000})
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"
        until(lambda: client.get("/health").json()["running_requests"] == 0)
