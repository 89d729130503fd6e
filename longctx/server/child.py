"""The engine's process as the HTTP process sees it: started, written to, read from, and its end told."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from longctx.config import EngineConfig
from longctx.server.messages import FromEngine, ToEngine
from longctx.server.outbox import Outbox

log = logging.getLogger(__name__)

REAP_S = 5.0
_BOOT = "import sys; sys.path[:] = {path!r}; from longctx.server.engine_process import main; main({fd})"


class Child:
    """One engine process. Belongs to the event loop that made it.

    `on_messages` hears what it says, in order; after the last of it `ended` becomes its exit status as text. The
    process lives no longer than this one: the pipe between them closes, however this one ends. It is a fresh
    interpreter, not a fork, and imports what this process would from the same places.
    """

    def __init__(self, config: EngineConfig, on_messages: Callable[[list[FromEngine]], None]):
        self._event_loop = asyncio.get_running_loop()
        self._on_messages = on_messages
        self.ended: asyncio.Future[str] = self._event_loop.create_future()
        self._connection, theirs = multiprocessing.Pipe()
        try:
            self._process = spawn(_BOOT.format(path=sys.path, fd=theirs.fileno()), theirs.fileno())
        finally:
            theirs.close()
        self._outbox = Outbox(self._connection)
        self._outbox.post(config)
        threading.Thread(target=self._read, name="longctx-engine-reader", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def post(self, message: ToEngine) -> None:
        """Send without waiting; lost if the process has ended."""
        self._outbox.post(message)

    def kill(self) -> None:
        """End it at once, if it still lives."""
        self._process.kill()

    def _read(self) -> None:
        try:
            while True:
                self._call(self._on_messages, self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception:
            log.exception("a message of the engine's process cannot be read")
            self._process.kill()
        try:
            code = self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._call(self._end, describe_exit(code))

    def _end(self, status: str) -> None:
        self._outbox.close(0)
        self._connection.close()
        if not self.ended.done():
            self.ended.set_result(status)

    def _call(self, function: Callable[[Any], None], argument: Any) -> None:
        try:
            self._event_loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            # The event loop was closed before the engine: nobody listens any more.
            self._process.kill()


def spawn(code: str, fd: int) -> subprocess.Popen[bytes]:
    """A fresh interpreter that runs `code` and inherits `fd`. It begins with SIGINT and SIGTERM blocked."""
    # A Ctrl-C goes to the whole group: while it is blocked here nothing is lost, and the child begins with it blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen([sys.executable, "-c", code], pass_fds=[fd], stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
