"""A server of this project for a benchmark: a process on loopback, asked over plain HTTP, stopped by its id."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longctx.errors import EngineError

START_S = 300.0
STOP_S = 60.0
_MAIN = "import sys; from longctx.cli import main; sys.exit(main())"


@dataclass
class Streamed:
    """One streamed completion as its client saw it; times in seconds of `time.perf_counter`.

    `progress` holds (time, `prompt_progress`); `token_s` the arrival of every chunk with text.
    """

    sent_s: float
    head_s: float | None = None
    request_id: str | None = None
    status: int | None = None
    progress: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    error: dict[str, Any] | None = None

    @property
    def gaps_s(self) -> list[float]:
        return [later - sooner for sooner, later in zip(self.token_s, self.token_s[1:], strict=False)]


class Live:
    """The address of a running server, and the requests a benchmark makes of it. Every call has its own connection."""

    def __init__(self, port: int, model: str):
        self.port = port
        self.model = model

    def call(
        self, method: str, path: str, body: Any = None, timeout_s: float = 600.0
    ) -> tuple[int, dict[str, str], bytes]:
        """One request; `body` is bytes or becomes JSON. Status, headers, body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        return json.loads(self.call("GET", path)[2])

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        seen: Callable[[Streamed], bool] = lambda _: True,
        **options: Any,
    ) -> Streamed:
        """A streamed completion; `seen` is called after every event, and False closes the connection."""
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "return_progress": True, **options}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600.0)
        data = json.dumps(body).encode()
        result = Streamed(time.perf_counter())
        try:
            connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            result.head_s, result.status = time.perf_counter(), answer.status
            if answer.status != 200:
                result.error = json.loads(answer.read())["error"]
                return result
            for line in answer:
                if line.startswith(b"data: {"):
                    _note(result, json.loads(line[6:]))
                    if not seen(result):
                        break
        finally:
            connection.close()
        return result


def _note(result: Streamed, chunk: dict[str, Any]) -> None:
    now_s = time.perf_counter()
    result.error = chunk.get("error") or result.error
    result.request_id = result.request_id or chunk.get("id")
    if "prompt_progress" in chunk:
        result.progress.append((now_s, chunk["prompt_progress"]))
    for choice in chunk.get("choices", ()):
        if choice.get("text"):
            result.token_s.append(now_s)
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
    result.usage = chunk.get("usage") or result.usage


@contextmanager
def live_server(model: str, *flags: str) -> Iterator[Live]:
    """`longctx serve MODEL` on a free port, ready to be asked; ended when the block is left."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-c", _MAIN, "serve", model, "--port", "0", "--jobs-dir", f"{folder}/jobs", *flags]
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        try:
            live = Live(_port(process, log), model)
            _wait_ready(process, live, log)
            live.model = live.get("/v1/models")["data"][0]["id"]
            yield live
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    for _ in _until(process, log):
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text()):
            return int(found[1])
    raise AssertionError("unreachable")


def _wait_ready(process: subprocess.Popen[bytes], live: Live, log: Path) -> None:
    for _ in _until(process, log):
        with suppress(OSError, http.client.HTTPException):
            if live.call("GET", "/ready", timeout_s=10.0)[0] == 200:
                return


def _until(process: subprocess.Popen[bytes], log: Path) -> Iterator[None]:
    """Tries, a tenth of a second apart, while the server lives and has time left to start."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        yield
        time.sleep(0.1)
    raise EngineError(f"the server did not start: {' '.join(log.read_text().split()[-60:])}")
