"""A queue that is full: a 429 with a time to come back, and jobs that wait for their place."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.live_jobs import post, wait
from tests.helpers.server import LiveServer, until
from tests.helpers.streams import ENDLESS, Stream

pytestmark = pytest.mark.slow  # a server takes its seconds to start

OK = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One request runs, one waits."""
    flags = ("--max-running", "1", "--max-queue", "1", "--ping-seconds", "0.2")
    with LiveServer(folder, *flags, cache=tmp_path_factory.mktemp("queue")) as live:
        yield live


def test_a_full_queue_is_a_429_with_a_time_to_come_back(server: LiveServer) -> None:
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


def test_a_job_waits_while_the_queue_is_full(server: LiveServer) -> None:
    endless = {"prompt": "the key", "ignore_eos": True, "max_tokens": 60_000}
    threads = []
    with server.client() as client:
        for running in (1, 2):

            def ask() -> None:
                with server.client(timeout=120) as own:
                    own.post("/v1/completions", json=endless)

            threads.append(threading.Thread(target=ask))
            threads[-1].start()
            until(lambda running=running: client.get("/health").json()["running_requests"] == running)
        id = post(client, **OK)["id"]
        with client.stream("GET", f"/v1/jobs/{id}/stream") as answer:
            assert next(answer.iter_lines()) == ": ping", "nothing to say yet, but not silent"
        time.sleep(1.0)
        assert client.get(f"/v1/jobs/{id}").json()["status"] == "queued"
        for record in client.get("/v1/requests").json()["data"]:
            client.delete(f"/v1/requests/{record['id']}")
        job = wait(client, id, "completed")
        assert job["attempts"] == 1
    for thread in threads:
        thread.join(60)
