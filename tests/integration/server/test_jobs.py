"""Jobs on a live server: posted, followed, cancelled; none lost when a client leaves."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.live_jobs import events, post, wait
from tests.helpers.server import LiveServer, until, words

pytestmark = pytest.mark.slow  # a server takes its seconds to start

Start = Callable[..., LiveServer]
LONG = {"prompt": words(40_000), "max_tokens": 1}
"""Takes seconds to read."""


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
    body = json.dumps({"endpoint": "/v1/completions", "body": {**OK, "prompt": words(8_000)}}).encode()
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


def test_a_second_server_on_the_same_folder_is_refused_in_one_line(live: LiveServer, start: Start) -> None:
    second = start("--jobs-dir", str(live.cache / "jobs" / str(live.port)), wait=False)
    assert second.wait_end() == 2
    lines = [line for line in second.stderr.splitlines() if "jobs folder" in line]
    assert len(lines) == 1 and "another server uses the jobs folder" in lines[0] and "--jobs-dir" in lines[0]
    assert "Traceback" not in second.stderr
    with live.client() as client:
        wait(client, post(client, prompt="a", max_tokens=1)["id"], "completed")
