"""Kills of the engine and of the server: what was begun ends right, and no process is left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.live_jobs import events, post, text_of, wait
from tests.helpers.server import LiveServer, engine_of, until, words
from tests.helpers.streams import ENDLESS, Stream, assert_all_gone, tree

pytestmark = pytest.mark.slow  # an engine takes its seconds to start

Start = Callable[..., LiveServer]


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose engine the tests kill."""
    with LiveServer(folder, cache=tmp_path_factory.mktemp("deaths")) as live:
        yield live
        assert live.stop() == 0
        assert "Traceback" not in live.stderr


def test_an_engine_that_is_killed_is_replaced(server: LiveServer) -> None:
    """What had not streamed is run again; what had ends with an error that a client can read."""
    streaming = Stream(server, max_tokens=60_000)
    answers: list[httpx.Response] = []

    def wait_for_answer() -> None:
        with server.client(timeout=180) as client:
            answers.append(
                client.post("/v1/completions", json={**ENDLESS, "stream": False, "max_tokens": 1000, "seed": 7})
            )

    waiting = threading.Thread(target=wait_for_answer)
    waiting.start()
    with server.client() as client:
        until(lambda: client.get("/health").json()["running_requests"] == 2)
        before = client.get("/health").json()["restarts"]
        os.kill(engine_of(server), signal.SIGKILL)
        until(lambda: client.get("/health").json()["restarts"] == before + 1)
        events = streaming.end()
        assert events[-1] == "[DONE]" and events[-2]["error"]["type"] == "server_error"
        waiting.join(180)
        assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 1000
        server.wait_ready()
        again = client.post("/v1/completions", json={**ENDLESS, "stream": False, "max_tokens": 1000, "seed": 7})
        assert again.json()["choices"] == answers[0].json()["choices"]
        assert f"longctx_engine_restarts_total {before + 1:.1f}" in client.get("/metrics").text


def test_a_kill_of_the_engine_starts_the_job_again_and_its_reader_sees_no_seam(server: LiveServer) -> None:
    with server.client(timeout=180) as client:
        id = post(client, prompt="the key", ignore_eos=True, max_tokens=400)["id"]
        stream = events(client, id)
        chunks = [next(stream)[1] for _ in range(20)]
        os.kill(engine_of(server), signal.SIGKILL)
        chunks += [chunk for _, chunk in stream]
        job = wait(client, id, "completed")
        [choice] = client.get(f"/v1/jobs/{id}/result").json()["choices"]
        assert (job["attempts"], text_of(chunks), chunks[-1]) == (2, choice["text"], "[DONE]")
        body = {"prompt": "the key", "ignore_eos": True, "max_tokens": 400, "seed": choice["seed"]}
        assert client.post("/v1/completions", json=body).json()["choices"] == [choice]


def test_a_kill_of_the_server_changes_nothing_of_what_its_jobs_answer(start: Start, tmp_path: Path) -> None:
    """Sampled, without a seed of the client's; one job is killed in its middle, one before it began."""
    flags = ("--jobs-dir", str(tmp_path / "jobs"))
    server = start(*flags)
    pids = tree(server)
    body = {"prompt": words(1000), "ignore_eos": True, "max_tokens": 400, "stream": True}
    with server.client() as client:
        first = post(client, **body, stream_options={"include_usage": True})
        others = [post(client, **{**body, "max_tokens": 20 + i}) for i in range(3)]
        stream = events(client, first["id"])
        before = [next(stream) for _ in range(40)]
        assert client.get(f"/v1/jobs/{first['id']}").json()["status"] == "running"
        server.kill()
    assert_all_gone(pids)
    server = start(*flags)
    with server.client() as client:
        # A reader who lost the connection goes on where it was, while the job runs again.
        after = list(events(client, first["id"], before[-1][0]))
        job = wait(client, first["id"], "completed")
        result = client.get(f"/v1/jobs/{first['id']}/result").json()
        [choice] = result["choices"]
        assert job["attempts"] == 2
        assert text_of([chunk for _, chunk in before + after]) == choice["text"]
        assert after[-1][1] == "[DONE]" and after[-2][1]["usage"] == job["usage"] == result["usage"]
        replayed = list(events(client, first["id"]))
        assert text_of([chunk for _, chunk in replayed]) == choice["text"]
        for other in others:
            wait(client, other["id"], "completed")
        direct = client.post("/v1/completions", json={**body, "stream": False, "seed": choice["seed"]}).json()
        assert direct["choices"] == result["choices"]
        assert direct["usage"]["completion_tokens"] == job["usage"]["completion_tokens"] == 400
    assert server.stop() == 0
    assert "Traceback" not in server.stderr and "never retrieved" not in server.stderr
