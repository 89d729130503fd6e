"""A live `longctx serve` for tests: a subprocess on a free loopback port, its stderr kept, stopped by its id."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.tiny import make_tiny
from tests.helpers.tokenizers import byte_level_tokenizer

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
STOP_S = 60.0
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def save_tiny(folder: Path, model_type: str = "llama", *, template: str | None = CHAT_TEMPLATE, **config: Any) -> Path:
    """A tiny random model with a byte-level tokenizer, as a folder that `longctx serve` takes."""
    make_tiny(model_type, **config).save_pretrained(folder)
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    try:
        tokenizer.save_pretrained(folder)
    finally:
        tokenizer.chat_template = None  # the tokenizer is shared
    return folder


class LiveServer:
    """`longctx serve MODEL` as a process. Use as a context manager, or call `stop` or `kill`."""

    def __init__(
        self,
        model: str | Path,
        *flags: str,
        cache: Path,
        env: dict[str, str] | None = None,
        wait: bool = True,
        listening: bool = True,
    ):
        """`wait` until it is ready, or else, if `listening`, until it says where it listens."""
        self.model = str(model)
        self.name = Path(model).name
        self.cache = cache
        # A key of the machine's owner is not the test's.
        inherited = {name: value for name, value in os.environ.items() if name != "LONGCTX_API_KEYS"}
        own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "LONGCTX_CACHE": str(cache)}
        environment = {**inherited, **own, **(env or {})}
        command = [sys.executable, "-c", "import sys; from longctx.cli import main; sys.exit(main())", "serve"]
        port = [] if "--port" in flags else ["--port", "0"]
        self.process = subprocess.Popen(
            [*command, self.model, *port, *flags],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""
        try:
            if listening:
                self.url = self._wait_for_url()
            if listening and wait:
                self.wait_ready()
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def stderr(self) -> str:
        """All that the server has written so far."""
        return "".join(list(self._lines))

    def client(self, timeout: float = 60.0, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout, trust_env=False, **options)

    def async_client(self, timeout: float = 60.0, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=timeout, trust_env=False, **options)

    def wait_ready(self, seconds: float = START_S) -> None:
        """Until `/ready` answers 200."""
        until = time.monotonic() + seconds
        with self.client() as client:
            while (status := self._ready_status(client)) != 200:
                assert self.process.poll() is None, f"the server ended while it started:\n{self.stderr}"
                assert time.monotonic() < until, f"not ready ({status}) after {seconds} s:\n{self.stderr}"
                time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal the server and wait for its end; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait_end()

    def wait_end(self, seconds: float = STOP_S) -> int:
        """Wait for the server's end; its exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server did not stop within {seconds} s:\n{self.stderr}") from None
        self._reader.join(10)
        return code

    def kill(self) -> None:
        """End it as nothing else may: SIGKILL."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()

    def _ready_status(self, client: httpx.Client) -> int:
        try:
            return client.get("/ready").status_code
        except httpx.TransportError:
            # It has ended or is about to: its own words say why.
            if self.process.wait(10) is not None:
                self._reader.join(10)
            return 0

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    def _wait_for_url(self) -> str:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if match := re.search(r"http://[^\s\"]+:\d+", self.stderr):
                return match[0]
            if self.process.poll() is not None:
                self._reader.join(10)
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.stderr}")
            time.sleep(0.02)
        raise AssertionError(f"the server did not listen within {START_S} s:\n{self.stderr}")


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children, as Linux lists them."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in task.read_text().split()]
    return found


def engine_of(server: LiveServer) -> int:
    """The process id of its engine."""
    [engine] = [p for p in children_of(server.pid) if b"engine_process" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return engine


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for a condition; its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
    return value


def metrics(client: httpx.Client) -> dict[str, float]:
    """Every sample of /metrics by its name and labels."""
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def idle(client: httpx.Client) -> bool:
    """Whether nothing runs and nothing is held: no request, no slot of the cache."""
    health = client.get("/health").json()
    held = metrics(client).get('longctx_kv_bytes{state="held",tier="g1"}', 0.0)
    return health["running_requests"] == 0 and held == 0.0


def raw_request(path: str, body: bytes, **headers: str) -> bytes:
    """A POST as bytes, for clients that misbehave."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def all_rss_bytes(server: LiveServer) -> int:
    """Resident memory of the server and its children."""
    return rss_bytes(server.pid) + sum(map(rss_bytes, children_of(server.pid)))


def words(num: int, seed: int = 0) -> str:
    """A prompt of `num` short words, some tokens each."""
    names: Sequence[str] = ("the", "key", "door", "fox", "open", "lazy", "dog", "over")
    return " ".join(names[(i * 7 + seed) % len(names)] for i in range(num))
