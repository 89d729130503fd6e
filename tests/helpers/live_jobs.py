"""Jobs of a live server as a client sees them: posted, waited for, followed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx

from tests.helpers.server import until

STREAM_S = 180.0
PATIENCE_S = 120.0


def post(client: httpx.Client, endpoint: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/jobs", json={"endpoint": endpoint, "body": body})
    assert answer.status_code == 202, answer.text
    return answer.json()


def wait(client: httpx.Client, id: str, *statuses: str) -> dict[str, Any]:
    def reached() -> dict[str, Any] | None:
        job = client.get(f"/v1/jobs/{id}").json()
        assert job["status"] in (*statuses, "queued", "running"), job
        return job if job["status"] in statuses else None

    return until(reached, PATIENCE_S)


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
