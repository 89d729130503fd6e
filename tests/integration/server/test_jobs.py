"""Jobs on a live server: posted, followed, cancelled; through kills of the server and of the engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.server import LiveServer, children_of, is_alive, words

pytestmark = pytest.mark.slow  # a server takes its seconds to start

Start = Callable[..., LiveServer]
STREAM_S = 180.0
LONG = {"prompt": words(40_000), "max_tokens": 1}
"""Takes seconds to read."""


def until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
    return value


def post(client: httpx.Client, endpoint: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/jobs", json={"endpoint": endpoint, "body": body})
    assert answer.status_code == 202, answer.text
    return answer.json()


def wait(client: httpx.Client, id: str, *statuses: str) -> dict[str, Any]:
    def reached() -> dict[str, Any] | None:
        job = client.get(f"/v1/jobs/{id}").json()
        assert job["status"] in (*statuses, "queued", "running"), job
        return job if job["status"] in statuses else None

    return until(reached)


def events(client: httpx.Client, id: str, place: str | None = None) -> Iterator[tuple[str | None, Any]]:
    """(id, object) of each event of a job's stream; the last object is "[DONE]"."""
    headers, until_s = {} if place is None else {"last-event-id": place}, time.monotonic() + STREAM_S
    with client.stream("GET", f"/v1/jobs/{id}/stream", headers=headers) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        event_id = None
        for line in answer.iter_lines():
            assert time.monotonic() < until_s, "pings keep a stream open that has no end"
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            elif name == "data":
                yield event_id, value if value == "[DONE]" else json.loads(value)
                event_id = None


def text_of(chunks: list[Any]) -> str:
    return "".join(c["choices"][0]["text"] for c in chunks if c != "[DONE]" and c["choices"])


def engine_of(server: LiveServer) -> int:
    [engine] = [p for p in children_of(server.pid) if b"engine_process" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return engine


# -- kills -----------------------------------------------------------------------------------------------------------


def test_a_kill_of_the_server_changes_nothing_of_what_its_jobs_answer(start: Start, tmp_path: Path) -> None:
    """Sampled, without a seed of the client's; one job is killed in its middle, one before it began."""
    flags = ("--jobs-dir", str(tmp_path / "jobs"))
    server = start(*flags)
    engine = engine_of(server)
    body = {"prompt": words(1000), "ignore_eos": True, "max_tokens": 800, "stream": True}
    with server.client() as client:
        first = post(client, **body, stream_options={"include_usage": True})
        others = [post(client, **{**body, "max_tokens": 20 + i}) for i in range(3)]
        stream = events(client, first["id"])
        before = [next(stream) for _ in range(40)]
        assert client.get(f"/v1/jobs/{first['id']}").json()["status"] == "running"
        server.kill()
    until(lambda: not is_alive(engine), 30)
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
        assert direct["usage"]["completion_tokens"] == job["usage"]["completion_tokens"] == 800
    assert server.stop() == 0
    assert "Traceback" not in server.stderr and "never retrieved" not in server.stderr


def test_a_kill_of_the_engine_starts_the_job_again_and_its_reader_sees_no_seam(start: Start, tmp_path: Path) -> None:
    server = start("--jobs-dir", str(tmp_path / "jobs"))
    with server.client(timeout=180) as client:
        id = post(client, prompt="the key", ignore_eos=True, max_tokens=1000)["id"]
        stream = events(client, id)
        chunks = [next(stream)[1] for _ in range(20)]
        os.kill(engine_of(server), signal.SIGKILL)
        chunks += [chunk for _, chunk in stream]
        job = wait(client, id, "completed")
        [choice] = client.get(f"/v1/jobs/{id}/result").json()["choices"]
        assert (job["attempts"], text_of(chunks), chunks[-1]) == (2, choice["text"], "[DONE]")
        body = {"prompt": "the key", "ignore_eos": True, "max_tokens": 1000, "seed": choice["seed"]}
        assert client.post("/v1/completions", json=body).json()["choices"] == [choice]


def test_a_second_server_on_the_same_folder_is_refused_in_one_line(start: Start, tmp_path: Path) -> None:
    flags = ("--jobs-dir", str(tmp_path / "jobs"))
    server = start(*flags)
    second = start(*flags, wait=False)
    assert second.wait_end() == 2
    lines = [line for line in second.stderr.splitlines() if "jobs folder" in line]
    assert len(lines) == 1 and "another server uses the jobs folder" in lines[0] and "--jobs-dir" in lines[0]
    assert "Traceback" not in second.stderr
    with server.client() as client:
        wait(client, post(client, prompt="a", max_tokens=1)["id"], "completed")


# -- one server ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": ["the key", "a door"], "n": 2, "max_tokens": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "logprobs": True}),
        ("/v1/responses", {"input": "the key", "max_output_tokens": 5}),
    ],
)
def test_a_job_is_posted_followed_read_listed_and_forgotten(live: LiveServer, endpoint: str, body: Any) -> None:
    with live.client() as client:
        answer = client.post("/v1/jobs", json={"endpoint": endpoint, "body": body})
        job = answer.json()
        assert answer.status_code == 202 and answer.headers["location"] == f"/v1/jobs/{job['id']}"
        assert (job["object"], job["endpoint"], job["attempts"]) == ("longctx.job", endpoint, 0)
        done = wait(client, job["id"], "completed")
        assert done["created_at"] <= done["started_at"] <= done["finished_at"] < done["expires_at"]
        assert done["progress"] is None and done["error"] is None
        result = client.get(f"/v1/jobs/{job['id']}/result")
        whole = result.json()
        assert result.headers["content-type"] == "application/json" and done["usage"] == whole["usage"]
        seeds = [whole["seed"]] if endpoint == "/v1/responses" else [c["seed"] for c in whole["choices"]]
        direct = client.post(endpoint, json={**body, "seed": seeds[0]}).json()
        changing = {"id", "created", "created_at", "completed_at", "timings", "usage", "output"}
        assert {k: v for k, v in whole.items() if k not in changing} == {
            k: v for k, v in direct.items() if k not in changing
        }
        if endpoint == "/v1/responses":
            assert whole["output"][0]["content"] == direct["output"][0]["content"]
        streamed = [chunk for _, chunk in events(client, job["id"])]
        last = streamed[-1]["type"] if endpoint == "/v1/responses" else streamed[-1]
        assert last in ("response.completed", "response.incomplete", "[DONE]")
        assert client.get("/v1/jobs", params={"limit": 1}).json()["data"] == [done]
        assert client.delete(f"/v1/jobs/{job['id']}").json() == {
            "id": job["id"],
            "object": "longctx.job",
            "deleted": True,
        }
        for path in (f"/v1/jobs/{job['id']}", f"/v1/jobs/{job['id']}/result", f"/v1/jobs/{job['id']}/stream"):
            gone = client.get(path)
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "job_not_found")


def test_the_list_comes_in_pages_and_by_status(live: LiveServer) -> None:
    with live.client() as client:
        ids = [post(client, prompt="a", max_tokens=1)["id"] for _ in range(5)]
        for id in ids:
            wait(client, id, "completed")
        first = client.get("/v1/jobs", params={"limit": 3}).json()
        assert [job["id"] for job in first["data"]] == ids[:1:-1] and first["has_more"]
        rest = client.get("/v1/jobs", params={"limit": 3, "after": first["last_id"]}).json()
        assert [job["id"] for job in rest["data"]][:2] == ids[1::-1]
        assert client.get("/v1/jobs", params={"status": "queued"}).json()["data"] == []
        for bad in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"status": "lost"}, {"after": "x" * 101}):
            assert client.get("/v1/jobs", params=bad).status_code == 422
        assert client.get("/v1/jobs", params={"after": "job_of_nobody"}).status_code == 404


OK = {"prompt": "a", "max_tokens": 1}
BAD: list[tuple[bytes | dict[str, Any], int, str]] = [
    (b"", 400, "empty"),
    (b"{", 400, "not valid JSON"),
    (b"[]", 400, "must be a JSON object"),
    (b'{"endpoint": NaN}', 400, "not valid JSON"),
    ({}, 400, "endpoint"),
    ({"endpoint": "/v1/completions"}, 400, "body"),
    ({"endpoint": "/v1/completions", "body": "text"}, 400, "body"),
    ({"endpoint": "/v1/embeddings", "body": OK}, 400, "endpoint must be one of"),
    ({"endpoint": 7, "body": OK}, 400, "endpoint"),
    ({"endpoint": "/v1/completions", "body": OK, "model": "tiny"}, 400, "job's own body"),
    ({"endpoint": "/v1/completions", "body": OK, "color": "red"}, 400, "Unrecognized request argument"),
    ({"endpoint": "/v1/completions", "body": OK, "ttl_s": 0}, 400, "ttl_s"),
    ({"endpoint": "/v1/completions", "body": OK, "ttl_s": "1"}, 400, "ttl_s"),
    ({"endpoint": "/v1/completions", "body": OK, "idempotency_key": ""}, 400, "idempotency_key"),
    ({"endpoint": "/v1/completions", "body": OK, "idempotency_key": "k" * 256}, 400, "idempotency_key"),
    ({"endpoint": "/v1/completions", "body": {}}, 400, "prompt"),
    ({"endpoint": "/v1/completions", "body": {**OK, "temperature": "hot"}}, 400, "temperature"),
    ({"endpoint": "/v1/completions", "body": {**OK, "stream": "yes"}}, 400, "stream"),
    ({"endpoint": "/v1/completions", "body": {**OK, "seed": 1.5}}, 400, "seed"),
    ({"endpoint": "/v1/completions", "body": {**OK, "model": "other"}}, 404, "does not exist"),
    ({"endpoint": "/v1/completions", "body": {**OK, "max_tokens": 10**9}}, 400, "65,536"),
    ({"endpoint": "/v1/completions", "body": {"prompt": words(60_000)}}, 400, "65,536"),
    ({"endpoint": "/v1/chat/completions", "body": OK}, 400, "messages"),
    ({"endpoint": "/v1/responses", "body": {"input": []}}, 400, "input"),
]


@pytest.mark.parametrize(("body", "status", "message"), BAD, ids=range(len(BAD)))
def test_what_could_only_fail_is_refused_when_it_is_posted(
    live: LiveServer, body: Any, status: int, message: str
) -> None:
    with live.client() as client:
        before = client.get("/v1/jobs", params={"limit": 1}).json()["first_id"]
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = client.post("/v1/jobs", content=raw)
        assert answer.status_code == status, answer.text
        assert message in answer.json()["error"]["message"] and len(answer.content) < 2000
        assert client.get("/v1/jobs", params={"limit": 1}).json()["first_id"] == before


def test_the_same_key_is_the_same_job_through_header_and_body(live: LiveServer) -> None:
    job = {"endpoint": "/v1/completions", "body": OK}
    with live.client() as client:
        header = {"idempotency-key": "a key"}
        first = client.post("/v1/jobs", json=job, headers=header)
        again = client.post("/v1/jobs", json={**job, "idempotency_key": "a key"})
        assert (first.status_code, again.status_code) == (202, 202)
        assert first.json()["id"] == again.json()["id"]
        assert "idempotent-replayed" not in first.headers and again.headers["idempotent-replayed"] == "true"
        other = client.post("/v1/jobs", json={**job, "ttl_s": 5}, headers=header)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
        two = client.post("/v1/jobs", json={**job, "idempotency_key": "another"}, headers=header)
        assert two.status_code == 400 and "differ" in two.json()["error"]["message"]
        empty = client.post("/v1/jobs", json=job, headers={"idempotency-key": "k" * 300})
        assert empty.status_code == 400 and "Idempotency-Key" in empty.json()["error"]["message"]


def test_a_job_shows_its_requests_progress_and_ends_between_two_layers(live: LiveServer) -> None:
    with live.client() as client:
        id = post(client, **LONG, return_progress=True)["id"]
        stream = events(client, id)
        place, chunk = next(stream)
        while chunk["prompt_progress"]["stage"] != "prefill":
            place, chunk = next(stream)
        assert place is None and chunk["id"] == f"cmpl-{id}"
        early = client.get(f"/v1/jobs/{id}/result")
        assert (early.status_code, early.json()["error"]["code"]) == (409, "job_not_finished")
        job = client.get(f"/v1/jobs/{id}").json()
        record = client.get(f"/v1/requests/{id}").json()
        later = client.get(f"/v1/jobs/{id}").json()["progress"]
        moving = {"processed", "time_ms", "eta_ms", "stage"}
        assert {k: v for k, v in job["progress"].items() if k not in moving} == {
            k: v for k, v in record.items() if k not in moving
        }
        assert job["status"] == "running" and record["total"] > 40_000
        assert job["progress"]["processed"] <= record["processed"] <= later["processed"] < record["total"]
        cancelled = client.delete(f"/v1/jobs/{id}").json()
        began = time.monotonic()
        assert (cancelled["status"], cancelled["id"]) == ("cancelled", id)
        assert client.post("/v1/completions", json=OK).status_code == 200
        assert time.monotonic() - began < 10, "the prefill did not go on to its end"
        rest = [chunk for _, chunk in stream if chunk == "[DONE]" or "error" in chunk]
        assert [rest[0]["error"]["code"], rest[1]] == ["job_cancelled", "[DONE]"]
        assert client.get(f"/v1/jobs/{id}/result").json()["error"]["code"] == "job_cancelled"
        assert until(lambda: client.get(f"/v1/requests/{id}").json())["finish_reason"] == "cancelled"
        assert client.delete(f"/v1/jobs/{id}").json()["deleted"] is True


def test_a_job_lives_on_when_its_client_leaves_without_reading_the_answer(live: LiveServer) -> None:
    body = json.dumps({"endpoint": "/v1/completions", "body": {**OK, "prompt": words(30_000)}}).encode()
    with live.client() as client:
        before = client.get("/v1/jobs", params={"limit": 1}).json()["first_id"]
        with socket.create_connection(("127.0.0.1", live.port), 10) as sock:
            head = f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            sock.shutdown(socket.SHUT_RD)
        newest = until(
            lambda: (
                (data := client.get("/v1/jobs", params={"limit": 1}).json()["data"])
                and data[0]["id"] != before
                and data[0]["id"]
            )
        )
        wait(client, newest, "completed")


def test_a_result_goes_when_its_time_is_over(live: LiveServer) -> None:
    with live.client() as client:
        answer = client.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": OK, "ttl_s": 1.5}).json()
        until(lambda: client.get(f"/v1/jobs/{answer['id']}").status_code == 404, 30)


def test_a_large_body_is_a_job_like_any_other(live: LiveServer) -> None:
    """Larger than what is read in the server's own process."""
    with live.client() as client:
        body = {"prompt": words(20_000), "max_tokens": 1, "temperature": 0, "n": 2, "prompt_cache_key": "x"}
        job = post(client, **body)
        assert len(job["warnings"]) == 1 and "prompt_cache_key" in job["warnings"][0]
        wait(client, job["id"], "completed")
        result = client.get(f"/v1/jobs/{job['id']}/result").json()
        assert result["warnings"] == job["warnings"]
        assert result["choices"][0]["text"] == result["choices"][1]["text"]


# -- servers of their own --------------------------------------------------------------------------------------------


def test_a_job_waits_while_the_queue_is_full(start: Start, tmp_path: Path) -> None:
    server = start(
        "--max-running", "1", "--max-queue", "1", "--jobs-dir", str(tmp_path / "jobs"), "--ping-seconds", "0.2"
    )
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


def test_other_keys_see_no_job_of_mine(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-first-key-0001\nsk-second-key-0002\n")
    server = start("--api-key-file", str(keys), "--jobs-dir", str(tmp_path / "jobs"))
    one = server.client(headers={"Authorization": "Bearer sk-first-key-0001"})
    two = server.client(headers={"Authorization": "Bearer sk-second-key-0002"})
    with one, two, server.client() as nobody:
        id = post(one, **OK)["id"]
        wait(one, id, "completed")
        for path in (f"/v1/jobs/{id}", f"/v1/jobs/{id}/result", f"/v1/jobs/{id}/stream"):
            assert (two.get(path).status_code, nobody.get(path).status_code) == (404, 401)
        assert two.delete(f"/v1/jobs/{id}").status_code == 404
        assert two.get("/v1/jobs").json()["data"] == []
        assert two.get("/v1/jobs", params={"after": id}).status_code == 404
        assert one.get(f"/v1/jobs/{id}/result").status_code == 200
        key = {"idempotency-key": "shared"}
        ids = [c.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": OK}, headers=key) for c in (one, two)]
        assert [answer.status_code for answer in ids] == [202, 202] and ids[0].json()["id"] != ids[1].json()["id"]


def test_results_can_be_read_while_the_model_loads(start: Start, tmp_path: Path) -> None:
    flags = ("--jobs-dir", str(tmp_path / "jobs"))
    server = start(*flags)
    with server.client() as client:
        id = post(client, **OK)["id"]
        wait(client, id, "completed")
    assert server.stop() == 0
    server = start(*flags, wait=False)
    with server.client() as client:
        answer = until(lambda: (a := client.get(f"/v1/jobs/{id}/result")).status_code == 200 and a)
        assert answer.json()["object"] == "text_completion"
