"""Faults of other servers on counts and memory that must stay right, whatever was asked before."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from longctx.config import EngineConfig
from longctx.server.app import build_service, create_app
from longctx.server.client import EngineClient
from longctx.server.service import Service
from longctx.server.settings import ServerSettings
from tests.helpers.server import (
    LiveServer,
    children_of,
    metrics,
    rss_bytes,
    until,
)
from tests.helpers.tiny import random_ids

# A server takes its seconds to start.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]


@pytest.fixture(scope="module")
def small(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose pool cannot hold what runs at a time."""
    flags = ("--kv-memory", "6MiB", "--max-running", "4", "--log-format", "json")
    with LiveServer(folder, *flags, cache=tmp_path_factory.mktemp("small")) as live:
        yield live


# -- B122: what was cached -------------------------------------------------------------------------------------------


def cached_of(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_b122_cached_tokens_are_what_was_not_computed(live: LiveServer) -> None:
    """vllm-project/vllm#18149: always the prompt minus one, or negative, or a crash of the metrics."""
    prompt = random_ids(3000, seed=122)
    with live.client() as client:

        def ask(ids: list[int]) -> dict[str, Any]:
            answer = client.post("/v1/completions", json={"prompt": ids, "max_tokens": 2, "ignore_eos": True}).json()
            record = client.get(f"/v1/requests/{answer['id']}").json()
            assert record["usage"]["prompt_tokens_details"] == answer["usage"]["prompt_tokens_details"]
            # Every prompt token was either found or computed, and the last generated one needs no computing.
            assert record["usage"]["computed_tokens"] == len(ids) - cached_of(answer["usage"]) + 1
            return dict(answer["usage"])

        assert cached_of(ask(prompt)) == 0
        warm = ask(prompt)
        assert 0 < cached_of(warm) <= len(prompt) - 1
        assert warm["prompt_tokens_details"]["by_tier"] == {"g1": cached_of(warm), "g2": 0, "g3": 0, "g4": 0}
        assert 2000 <= cached_of(ask(prompt[:2000] + random_ids(500, seed=5))) < 2500
        assert cached_of(ask(random_ids(3000, seed=123))) < 10


def test_b122_counts_stay_right_through_preemption_and_metrics_never_fall(small: LiveServer) -> None:
    """More requests than the pool holds: some are put back and computed again, which are no cached tokens."""
    seen: list[dict[str, float]] = []
    done = threading.Event()

    def scrape() -> None:
        with small.client() as client:
            while not done.is_set():
                seen.append(
                    {k: v for k, v in metrics(client).items() if k.split("{")[0].endswith(("_total", "_count"))}
                )
                time.sleep(0.05)

    def ask(seed: int) -> None:
        body = {"prompt": random_ids(1500, seed=seed), "max_tokens": 1500, "ignore_eos": True}
        with small.client(timeout=300) as client:
            usages.append(client.post("/v1/completions", json=body).json()["usage"])

    usages: list[dict[str, Any]] = []
    scraper = threading.Thread(target=scrape)
    scraper.start()
    askers = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(300)
    done.set()
    scraper.join()
    assert [cached_of(usage) for usage in usages] == [0] * 4
    assert [usage["completion_tokens"] for usage in usages] == [1500] * 4
    with small.client() as client:
        assert metrics(client)["longctx_preemptions_total"] > 0, "nothing was preempted: the pool is too large"
    for before, after in itertools.pairwise(seen):
        fell = {name for name, value in before.items() if after[name] < value}
        assert not fell, fell


# -- B143: growth ----------------------------------------------------------------------------------------------------


def test_b143_memory_does_not_grow_with_requests(small: LiveServer) -> None:
    """sgl-project/sglang#6914: the host memory of the scheduler grows with every request.

    Ends, errors, cancels and disconnects, mixed; after a warm-up that fills what is bounded.
    """

    def mixed(count: int) -> None:
        with small.client() as client:
            for i in range(count):
                kind = i % 10
                if kind < 6:
                    client.post("/v1/completions", json={"prompt": f"key {i}", "max_tokens": 2})
                elif kind == 6:
                    client.post("/v1/completions", json={"prompt": f"key {i}", "temperature": -i})
                elif kind == 7:
                    assert client.post("/v1/chat/completions", json={"messages": []}).status_code == 400
                elif kind == 8:
                    body = {"prompt": f"door {i}", "max_tokens": 5000, "ignore_eos": True, "stream": True}
                    with client.stream("POST", "/v1/completions", json=body) as answer:
                        next(answer.iter_raw())
                else:
                    assert client.get(f"/v1/requests/none-{i}").status_code == 404

    def settle() -> tuple[int, ...]:
        with small.client() as client:
            until(lambda: client.get("/health").json()["running_requests"] == 0)
            until(lambda: metrics(client)['longctx_kv_bytes{state="held",tier="g1"}'] == 0)
        return tuple(map(rss_bytes, (small.pid, *children_of(small.pid))))

    mixed(300)
    before = settle()
    mixed(1000)
    after = settle()
    growth = [b - a for a, b in zip(before, after, strict=True)]
    assert sum(growth) < 1000 * 1000 + 2**20, growth


def test_b143_no_request_is_remembered_when_nothing_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every map from requests to something is empty at idle, whatever became of them; the real engine is behind it."""
    monkeypatch.setenv("LONGCTX_CACHE", str(folder.parent / "cache"))

    async def main() -> None:
        client = EngineClient(EngineConfig.from_options(str(folder), kv_memory="64MiB"))
        service = build_service(ServerSettings(max_tracked=8, served_name="tiny"), client)
        await service.start()
        assert service.failure is None
        try:
            await ask_in_every_way(service)
            await asyncio.wait_for(service.wait_idle(), 60)
            while client.stats is None or client.stats.running or client.stats.waiting:
                await asyncio.sleep(0.05)
            maps: list[Any] = [service.running, client._tickets, client._queries, service.metrics._last_token_s]
            assert [len(m) for m in maps] == [0, 0, 0, 0]
            assert service.registry.num_live == 0 and len(service.registry._finished) == 8
            assert service.preparer._waiting_bytes == 0
        finally:
            await service.stop()

    asyncio.run(asyncio.wait_for(main(), 300))


async def ask_in_every_way(service: Service) -> None:
    """Ends, errors, deadlines, cancels, and callers that go away at any moment."""
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:

        async def post(**body: Any) -> int:
            return (await http.post("/v1/completions", json={"ignore_eos": True, **body})).status_code

        assert await post(prompt="a", max_tokens=2, n=3) == 200
        assert await post(prompt="a", temperature=-1) == 400
        assert await post(prompt="a", max_tokens=60_000, timeout_s=0.2) == 504
        cancelled = asyncio.create_task(post(prompt="a", max_tokens=60_000))
        while not (live := service.registry.live()) or live[0].stage != "decode":
            await asyncio.sleep(0.01)
        service.cancel(live[0])
        assert await cancelled == 499
        for after_s in (0.0, 0.001, 0.005, 0.02, 0.1, 0.3):
            for body in ({"stream": True}, {"n": 2}, {"prompt": "a " * 40_000}):
                gone = asyncio.create_task(post(**{"prompt": "a", "max_tokens": 60_000, **body}))
                await asyncio.sleep(after_s)
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
