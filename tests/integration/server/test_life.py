"""A server's life: it listens while the model loads, serves, drains, ends, and leaves nobody behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.server import LiveServer, children_of, is_alive, save_tiny, until, words

pytestmark = pytest.mark.slow  # a server takes its seconds to start

Start = Callable[..., LiveServer]
ENDLESS: dict[str, Any] = {"prompt": "the key", "ignore_eos": True, "stream": True}


class Stream:
    """A streamed completion read by a thread of its own."""

    def __init__(self, server: LiveServer, **body: Any):
        self.lines: list[str] = []
        self.error: Exception | None = None
        self._server = server
        self._body = {**ENDLESS, **body}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        until(lambda: self.data or self.error)

    @property
    def data(self) -> list[str]:
        return [line.removeprefix("data: ") for line in list(self.lines) if line.startswith("data: ")]

    def end(self, seconds: float = 60.0) -> list[Any]:
        """Every event, when the stream has ended; the last is "[DONE]" for a whole one."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the stream did not end"
        return [line if line == "[DONE]" else json.loads(line) for line in self.data]

    def _read(self) -> None:
        try:
            with self._server.client() as client, client.stream("POST", "/v1/completions", json=self._body) as answer:
                self.lines.extend(answer.iter_lines())
        except httpx.HTTPError as error:
            self.error = error


def tree(server: LiveServer) -> list[int]:
    """The server's process and all below it."""
    found = [server.pid]
    for pid in found:
        found += children_of(pid)
    return found


def assert_all_gone(pids: list[int]) -> None:
    until(lambda: not any(map(is_alive, pids)), 30)


# -- start -----------------------------------------------------------------------------------------------------------


def test_it_listens_while_the_model_loads_and_says_when_it_is_ready(start: Start) -> None:
    server = start(wait=False)
    with server.client() as client:
        first = client.get("/ready")
        assert client.get("/health").status_code == 200
        if first.status_code == 503:  # it cannot be ready before its own imports are done
            assert first.json()["engine"] == "starting" and int(first.headers["retry-after"]) >= 1
        server.wait_ready()
        ready = client.get("/ready").json()
        assert ready["status"] == "ready" and ready["loading"] is None
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    until(lambda: "longctx serves tiny at" in server.stderr)
    table = server.stderr.partition("longctx serves")[2]
    assert all(word in table for word in ("/v1/chat/completions", "formats", "memory", "tiers", "limits", "jobs"))
    assert server.stop() == 0


def test_log_as_json_is_json_on_every_line(start: Start) -> None:
    server = start("--log-format", "json")
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "my secret words", "max_tokens": 1})
        client.post("/v1/completions", json={"prompt": "my secret words", "temperature": "hot"})
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.stderr.splitlines()]
    assert any(line["message"] == "ready" for line in lines)
    assert "secret" not in server.stderr


def test_keys_keep_the_others_out_and_their_requests_apart(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-file-key-0001\n")
    server = start("--api-key-file", str(keys), env={"LONGCTX_API_KEYS": "sk-env-key-0002"})
    prompt = {"prompt": words(300), "max_tokens": 1}
    with server.client() as nobody:
        for path in ("/v1/models", "/metrics", "/v1/requests"):
            assert nobody.get(path).status_code == 401
        for path in ("/v1/completions", "/tokenize", "/v1/jobs"):
            assert nobody.post(path, json=prompt).status_code == 401
        assert nobody.get("/ready").status_code == 200
    one = server.client(headers={"Authorization": "Bearer sk-file-key-0001"})
    two = server.client(headers={"Authorization": "Bearer sk-env-key-0002"})
    with one, two:

        def cached(client: httpx.Client, **salt: str) -> tuple[str, int]:
            answer = client.post("/v1/completions", json={**prompt, **salt}).json()
            return answer["id"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        id, cold = cached(one)
        assert cold == 0 and cached(one)[1] > 0
        assert cached(two)[1] == 0, "a tenant must not see by the time it takes what another one asked"
        assert cached(one, cache_salt="x")[1] == 0
        assert one.get(f"/v1/requests/{id}").status_code == 200
        assert two.get(f"/v1/requests/{id}").status_code == two.delete(f"/v1/requests/{id}").status_code == 404
        assert "sk-" not in server.stderr


# -- end -------------------------------------------------------------------------------------------------------------


def test_a_stop_lets_what_runs_end_and_takes_nothing_new(start: Start) -> None:
    server = start()
    pids = tree(server)
    assert len(pids) >= 2
    stream = Stream(server, max_tokens=3000)
    server.process.send_signal(signal.SIGTERM)
    with server.client() as client:
        until(lambda: client.get("/ready").status_code == 503)
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "draining"
        assert client.get("/health").json()["draining"] is True
    events = stream.end()
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-2]["usage"] is None or events[-2]["usage"]["completion_tokens"] == 3000
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(start: Start, number: int) -> None:
    server = start("--drain-seconds", "600")
    pids = tree(server)
    stream = Stream(server, max_tokens=60_000)
    server.process.send_signal(number)
    until(lambda: "no new requests" in server.stderr)
    server.process.send_signal(number)
    server.wait_end(30)
    stream.end()
    assert_all_gone(pids)


def test_ctrl_c_reaches_the_whole_group_and_only_the_server_acts_on_it(start: Start) -> None:
    """A terminal sends SIGINT to every process: the engine must not die of it while an answer is being drained."""
    server = start()
    pids = tree(server)
    stream = Stream(server, max_tokens=2000)
    os.killpg(server.pid, signal.SIGINT)
    events = stream.end()
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
    assert server.wait_end() == 0
    assert_all_gone(pids)


@pytest.mark.parametrize("listening", [False, True])
def test_a_signal_while_the_model_loads_ends_it(start: Start, listening: bool) -> None:
    """Also before the server has imported what it needs to answer, while only the engine's process runs."""
    server = start(wait=False, listening=listening)
    pids = until(lambda: len(found := tree(server)) >= 2 and found)
    assert server.stop() == 0
    assert_all_gone(pids)


def test_kill_9_leaves_no_process_behind(start: Start) -> None:
    server = start()
    pids = tree(server)
    Stream(server, max_tokens=60_000)
    server.kill()
    assert_all_gone(pids)


def test_an_engine_that_is_killed_is_replaced(start: Start) -> None:
    """What had not streamed is run again; what had ends with an error that a client can read."""
    server = start()
    [engine] = [
        pid for pid in children_of(server.pid) if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    streaming = Stream(server, max_tokens=60_000)
    answers: list[httpx.Response] = []

    def wait_for_answer() -> None:
        with server.client(timeout=180) as client:
            answers.append(
                client.post("/v1/completions", json={**ENDLESS, "stream": False, "max_tokens": 3000, "seed": 7})
            )

    waiting = threading.Thread(target=wait_for_answer)
    waiting.start()
    with server.client() as client:
        until(lambda: client.get("/health").json()["running_requests"] == 2)
        os.kill(engine, signal.SIGKILL)
        until(lambda: client.get("/health").json()["restarts"] == 1)
        events = streaming.end()
        assert events[-1] == "[DONE]" and events[-2]["error"]["type"] == "server_error"
        waiting.join(180)
        assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 3000
        server.wait_ready()
        again = client.post("/v1/completions", json={**ENDLESS, "stream": False, "max_tokens": 3000, "seed": 7})
        assert again.json()["choices"] == answers[0].json()["choices"]
        assert "longctx_engine_restarts_total 1.0" in client.get("/metrics").text


def test_a_job_survives_kill_9_of_the_server(start: Start, tmp_path: Path) -> None:
    flags = ("--jobs-dir", str(tmp_path / "jobs"))
    server = start(*flags)
    job = {"endpoint": "/v1/completions", "body": {**ENDLESS, "stream": False, "max_tokens": 4000, "seed": 5}}
    with server.client() as client:
        id = client.post("/v1/jobs", json=job).json()["id"]
        until(lambda: client.get(f"/v1/jobs/{id}").json()["status"] == "running")
    server.kill()
    server = start(*flags)
    with server.client(timeout=120) as client:
        until(lambda: client.get(f"/v1/jobs/{id}").json()["status"] == "completed", 120)
        result = client.get(f"/v1/jobs/{id}/result").json()
        assert result["usage"]["completion_tokens"] == 4000
        direct = client.post("/v1/completions", json=job["body"]).json()
        assert direct["choices"] == result["choices"]


def test_a_job_in_progress_does_not_hold_up_a_stop(start: Start, tmp_path: Path) -> None:
    """It is on disk: the next server runs it, so draining need not wait for it."""
    flags = ("--jobs-dir", str(tmp_path / "jobs"), "--drain-seconds", "300")
    server = start(*flags)
    job = {"endpoint": "/v1/completions", "body": {**ENDLESS, "stream": False, "max_tokens": 50_000}}
    with server.client() as client:
        id = client.post("/v1/jobs", json=job).json()["id"]
        until(lambda: client.get(f"/v1/jobs/{id}").json()["status"] == "running")
    assert server.stop() == 0
    server = start(*flags)
    with server.client() as client:
        assert client.get(f"/v1/jobs/{id}").json()["status"] in ("queued", "running")
        client.delete(f"/v1/jobs/{id}")
    assert server.stop() == 0


# -- limits ----------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_a_429_with_a_time_to_come_back(start: Start) -> None:
    server = start("--max-running", "1", "--max-queue", "1")
    streams = [Stream(server, max_tokens=30_000)]
    with server.client() as client:
        waiting = threading.Thread(
            target=lambda: client.post("/v1/completions", json={**ENDLESS, "stream": False, "max_tokens": 1})
        )
        waiting.start()
        with server.client() as other:
            until(lambda: other.get("/health").json()["running_requests"] == 2)
            refused = until(
                lambda: (
                    (a := other.post("/v1/completions", json={"prompt": "b", "max_tokens": 1})).status_code == 429 and a
                )
            )
            assert refused.json()["error"]["code"] == "queue_full"
            assert 1 <= int(refused.headers["retry-after"]) <= 600
            for record in other.get("/v1/requests").json()["data"]:
                other.delete(f"/v1/requests/{record['id']}")
            waiting.join(60)
            until(lambda: other.get("/health").json()["running_requests"] == 0)
            assert other.post("/v1/completions", json={"prompt": "b", "max_tokens": 1}).status_code == 200
    assert streams[0].end()[-1] == "[DONE]"


def test_the_servers_time_limit_ends_a_request(start: Start) -> None:
    server = start("--request-timeout", "2")
    began = time.monotonic()
    events = Stream(server, max_tokens=60_000).end()
    assert 1.5 < time.monotonic() - began < 30
    assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "deadline_exceeded"
    with server.client() as client:
        answer = client.post("/v1/completions", json={**ENDLESS, "stream": False, "max_tokens": 60_000})
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"
        until(lambda: client.get("/health").json()["running_requests"] == 0)


def test_it_warns_when_anybody_may_reach_it(start: Start) -> None:
    server = start("--host", "0.0.0.0", wait=False)
    until(lambda: "anyone who reaches" in server.stderr)
    with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: llm.example\r\nConnection: close\r\n\r\n")
        assert b" 200 " in sock.recv(65536)


def test_a_base_model_says_what_to_do_about_chats(start: Start, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", template=None)
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    with start(model=base) as server, server.client() as client:
        answer = client.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 400 and "--chat-template" in answer.json()["error"]["message"]
    server = start("--chat-template", str(template), "--served-model-name", "mine", model=base)
    with server.client() as client:
        assert client.post("/v1/chat/completions", json=chat).json()["model"] == "mine"
