"""What a real server counts and logs: true figures, in one format, through the death of its engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.server import LiveServer, save_tiny

pytestmark = pytest.mark.slow

SECRET = "the vault opens with 4711"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("observed")
    model = save_tiny(root / "model", max_position_embeddings=4096)
    with LiveServer(model, "--kv-memory", "64MiB", "--log-format", "json", cache=root / "cache") as server:
        yield server


def metrics(client: httpx.Client) -> dict[str, float]:
    """Every sample by its name and labels."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        "".join([s.name, *(f" {name}={value}" for name, value in sorted(s.labels.items()))]): s.value
        for family in families
        for s in family.samples
    }


def complete(client: httpx.Client, server: LiveServer, prompt: str, max_tokens: int) -> dict[str, Any]:
    body = {"model": server.name, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    usage: dict[str, Any] = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    return usage


def settled(client: httpx.Client, name: str, value: float, seconds: float = 60.0) -> dict[str, float]:
    """The metrics once `name` is `value`: the engine's counts arrive a moment after its answer."""
    until = time.monotonic() + seconds
    while (found := metrics(client)).get(name) != value:
        assert time.monotonic() < until, f"{name} is {found.get(name)}, not {value}"
        time.sleep(0.1)
    return found


def test_figures_are_true_and_outlive_the_engine(server: LiveServer) -> None:
    with server.client() as client:
        cold = complete(client, server, SECRET * 20, 8)
        warm = complete(client, server, SECRET * 20, 4)
        cached = warm["prompt_tokens_details"]["cached_tokens"]
        computed = cold["prompt_tokens"] + warm["prompt_tokens"] - cached
        assert cached > 0
        before = settled(client, "longctx_prefill_tokens_total source=computed", computed)
        assert before["longctx_prefill_tokens_total source=g1"] == cached
        assert before["longctx_time_to_first_token_seconds_count"] == 2
        assert before["longctx_inter_token_latency_seconds_count"] == 7 + 3
        assert before["longctx_requests_total endpoint=completions outcome=length"] == 2
        assert before["longctx_request_answer_tokens_sum"] == 12
        assert before["longctx_http_requests_total method=POST route=/v1/completions status=200"] == 2
        assert before["longctx_engine_up"] == 1

        (engine,) = (
            child for child in psutil.Process(server.pid).children() if "engine_process" in "".join(child.cmdline())
        )
        engine.kill()
        settled(client, "longctx_engine_restarts_total", 1)
        settled(client, "longctx_engine_up", 1, seconds=120)
        again = complete(client, server, SECRET * 20, 4)
        assert again["prompt_tokens_details"]["cached_tokens"] == 0
        after = settled(client, "longctx_prefill_tokens_total source=computed", computed + again["prompt_tokens"])
    fell = {name for name, value in before.items() if name.split(" ")[0].endswith("_total") and after[name] < value}
    assert fell == set()


def test_only_the_engine_has_torch_in_its_memory(server: LiveServer) -> None:
    process = psutil.Process(server.pid)
    engine, worker = sorted(process.children(), key=lambda child: "engine_process" not in "".join(child.cmdline()))
    loaded = [any("libtorch" in mapped.path for mapped in p.memory_maps()) for p in (engine, process, worker)]
    assert loaded == [True, False, False]


def test_every_line_is_json_and_none_shows_a_prompt(server: LiveServer) -> None:
    """The engine's process writes to the same place, and the death of one is told there too."""
    with server.client() as client:
        client.post("/v1/completions", json={"model": "no-such-model", "prompt": SECRET})
        client.post("/v1/completions", content=b"{" + SECRET.encode())
        client.get(f"/nothing?{SECRET.replace(' ', '+')}")
        answer = client.post("/v1/completions", json={"model": server.name, "prompt": SECRET, "max_tokens": 1})
    request_id = answer.headers["x-request-id"]
    records = [json.loads(line) for line in server.stderr.splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(record) for record in records)
    (ready,) = (record for record in records if record["message"] == "ready")
    assert ready["url"] == server.url and "POST /v1/completions" in ready["endpoints"]
    ends = [record for record in records if record["message"] == "a request ended"]
    (end,) = (record for record in ends if record["request_id"] == request_id)
    assert end["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert {record["outcome"] for record in ends} >= {"length", "refused"}
    assert not any("4711" in json.dumps(record) for record in records if record["logger"] != "uvicorn.access")
    assert "longctx.build" in {record["logger"] for record in records}
