"""Streams of a live server read by threads of their own, and what becomes of its processes."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx

from tests.helpers.server import LiveServer, children_of, is_alive, until

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
