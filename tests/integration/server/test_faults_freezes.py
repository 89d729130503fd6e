"""Faults of other servers on long work: everybody else freezes, or nobody hears anything for minutes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.server import (
    LiveServer,
    children_of,
    words,
)
from tests.helpers.tiny import random_ids

# A server takes its seconds to start.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]

LONG = 40_000
"""Tokens of a prompt that takes seconds to read."""


# -- B113: freezes ---------------------------------------------------------------------------------------------------


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Poller:
    """Asks /health and /v1/models every 20 ms and keeps how long each took."""

    def __init__(self, server: LiveServer):
        self.took_s: list[float] = []
        self._stop = threading.Event()
        self._server = server
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def _poll(self) -> None:
        with self._server.client() as client:
            while not self._stop.is_set():
                for path in ("/health", "/v1/models"):
                    began = time.perf_counter()
                    assert client.get(path).status_code == 200
                    self.took_s.append(time.perf_counter() - began)
                time.sleep(0.02)

    def __enter__(self) -> Poller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def test_b113_neither_tokenizing_nor_prefill_freezes_the_others(live: LiveServer) -> None:
    """vllm-project/vllm#10635: tokenizing, templates or prefill on the event loop stop /health and every stream.

    The bound is 150 ms for a quiet machine; on a busy one it is what the same machine shows without load, times five.
    """
    text = "the quick brown fox " * 250_000
    with live.client(timeout=120) as client:
        client.post("/tokenize", json={"prompt": words(20_000)})  # from here on the worker is there
        with Poller(live) as quiet:
            time.sleep(1.0)
        gaps: list[float] = []
        reading = threading.Event()

        def read() -> None:
            body = {"prompt": "the key", "max_tokens": 60_000, "ignore_eos": True, "stream": True}
            with live.client() as own, own.stream("POST", "/v1/completions", json=body) as stream:
                last = time.perf_counter()
                for line in stream.iter_lines():
                    if line.startswith("data"):
                        gaps.append(time.perf_counter() - last)
                        last = time.perf_counter()
                        reading.set()
                    if stop.is_set():
                        return

        stop = threading.Event()
        thread = threading.Thread(target=read)
        thread.start()
        assert reading.wait(30)
        with Poller(live) as preparing:
            answers = [client.post("/v1/completions", json={"prompt": text, "max_tokens": 1}) for _ in range(3)]
            answers.append(client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]}))
        with Poller(live) as reading_prompt:
            long = client.post("/v1/completions", json={"prompt": random_ids(20_000, seed=1), "max_tokens": 1})
        count = len(gaps)
        stop.set()
        thread.join()
    assert [a.status_code for a in answers] == [400] * 4 and long.status_code == 200
    bound = max(0.15, 5 * percentile(quiet.took_s, 0.95))
    for poller in (preparing, reading_prompt):
        assert percentile(poller.took_s, 0.95) < bound, (statistics.median(poller.took_s), max(poller.took_s))
    assert count > 20 and max(gaps) < 10


# -- B117: silence ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_b117_a_long_prefill_is_never_silent(live: LiveServer, path: str) -> None:
    """ggml-org/llama.cpp#24013: no byte for minutes, so that proxies and clients give up.

    The head leaves at once, pings are comments of their own and never inside an event.
    """
    # The first is the long one, with pings; the others differ in their events alone.
    text = words(LONG // 3 if path == "/v1/completions" else LONG // 9, seed=len(path))
    body: dict[str, Any] = {"max_tokens": 2, "stream": True, "ignore_eos": True}
    if path == "/v1/completions":
        body["prompt"] = text
    elif path == "/v1/responses":
        body |= {"input": text, "max_output_tokens": 2}
        del body["max_tokens"]
    else:
        body["messages"] = [{"role": "user", "content": text}]
    chunks: list[tuple[float, bytes]] = []
    with live.client(timeout=httpx.Timeout(60, read=20)) as client:
        began = time.perf_counter()
        with client.stream("POST", path, json=body) as answer:
            head_s = time.perf_counter() - began
            assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
            for chunk in answer.iter_raw():
                chunks.append((time.perf_counter() - began, chunk))
    assert head_s < 5
    events = b"".join(chunk for _, chunk in chunks).split(b"\n\n")
    assert events.pop() == b""
    pings = [event for event in events if event.startswith(b":")]
    took_s = chunks[-1][0]
    assert len(pings) >= int(took_s / 0.5) // 4 and all(event == b": ping" for event in pings)
    for event in events:
        if not event.startswith(b":"):
            data = event.rpartition(b"data: ")[2]
            assert data == b"[DONE]" or json.loads(data)
    times = [0.0, *(at for at, _ in chunks)]
    assert max(b - a for a, b in itertools.pairwise(times)) < 10


def test_b117_a_head_waits_neither_for_its_text_nor_for_others(live: LiveServer) -> None:
    """The process that reads large texts stands still: a stream of 70 KB begins, a bad field of it is a 400."""
    (worker,) = (pid for pid in children_of(live.pid) if b"prepare_worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
    fields = {"max_tokens": 2, "stream": True, "ignore_eos": True, "return_progress": True}
    body = {"prompt": random_ids(19_000, seed=117), **fields}
    with live.client() as client:
        client.post("/tokenize", json={"prompt": words(20_000)})  # from here on the worker is ready
        os.kill(worker, signal.SIGSTOP)
        try:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                events = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
                assert json.loads(next(events))["prompt_progress"]["stage"] == "tokenizing"
                refused = client.post("/v1/completions", json={**body, "temperature": -1})
                assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"
                os.kill(worker, signal.SIGCONT)
                *_, last, done = events
                assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "length"
        finally:
            os.kill(worker, signal.SIGCONT)
