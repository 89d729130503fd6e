"""One live server for the tests that share it, and folders of models for those that start their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server import LiveServer, idle, save_tiny, until

POSITIONS = 65536
"""Long enough that reading a prompt takes seconds, which a test needs to do something meanwhile."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model of 64K positions."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=POSITIONS)


@pytest.fixture(scope="session")
def live(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server shared by all tests: each leaves it idle, and none may make it fail."""
    flags = ("--kv-memory", "96MiB", "--ping-seconds", "0.5")
    with LiveServer(folder, *flags, cache=tmp_path_factory.mktemp("cache")) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.stderr and "never retrieved" not in server.stderr


@pytest.fixture
def nothing_is_left(live: LiveServer) -> Iterator[None]:
    """After the test the shared server must fall idle, hold nothing and never have lost its engine."""
    yield
    with live.client() as client:
        until(lambda: idle(client))
        health = client.get("/health").json()
        assert health["engine"] == "ready" and health["restarts"] == 0


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Callable[..., LiveServer]]:
    """Start a server of one's own; it is ended with the test."""
    servers: list[LiveServer] = []

    def start_one(*flags: str, model: Path = folder, **options: Any) -> LiveServer:
        servers.append(LiveServer(model, *flags, cache=tmp_path / "cache", **options))
        return servers[-1]

    yield start_one
    for server in servers:
        server.kill()
