"""Prepares bodies: small ones in a thread here, large ones in processes of low priority that may die and come again."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from longctx.server.child import describe_exit, spawn
from longctx.server.errors import ApiError
from longctx.server.job_body import Order
from longctx.server.messages import ModelInfo
from longctx.server.prepare import prepare
from longctx.server.prepare_worker import Done, Setup, Task, internal_error
from longctx.server.settings import ServerSettings
from longctx.server.text_side import TextSide, UnreadText
from longctx.server.text_tasks import perform
from longctx.server.work import Prepared, ReplyOptions

log = logging.getLogger(__name__)

SMALL_BODY_BYTES = 64 * 2**10
NICENESS = 10
"""Of a worker below this process: beside an engine on all cores it gets 6 % of them (decision 17)."""

MAX_TASK_S = 600.0
MAX_START_S = 120.0
WAITING_BODIES = 4
"""Large bodies of full size that may wait; more is asked to come again."""

_BOOT = """
import sys
sys.path[:] = {path!r}
from longctx.server.without_torch import keep_torch_out
keep_torch_out()
from longctx.server.prepare_worker import main
main({fd})
"""


class WorkerDied(Exception):
    """A worker ended inside a task."""


class Worker:
    """One worker process and the thread that talks to it.

    A process that dies is started again at once, and the task that it had is tried once more. It dies with this
    process: the pipe between them closes, however this one ends.
    """

    def __init__(self, setup: Setup):
        self._setup = setup
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="longctx-prepare")
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._stopping = False
        self.restarts = -1
        self._thread.submit(self._keep_alive)

    @property
    def pid(self) -> int | None:
        """The process's id, None while there is none."""
        return None if self._process is None else self._process.pid

    async def call(self, task: str, body: bytes | bytearray) -> Any:
        """A task's value. Raises `ApiError`; cancelling gives up waiting, and a task that has begun runs to its end."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, task, body)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise _stopping() from None  # nobody cancelled the caller: its turn never came

    async def stop(self) -> None:
        """End the process and the thread."""
        self._stopping = True
        process = self._process
        if process is not None:
            process.kill()
        await asyncio.to_thread(self._thread.shutdown, True, cancel_futures=True)
        if process is not None:
            await asyncio.to_thread(process.wait)

    def _call(self, task: str, body: bytes | bytearray) -> Any:
        for last_try in (False, True):
            try:
                return self._ask(task, body)
            except WorkerDied as error:
                if self._stopping:
                    raise _stopping() from None
                log.warning("the process that prepares large bodies has ended: %s", error)
                if last_try:
                    raise ApiError(
                        500,
                        "the process that reads large bodies ended twice over this one",
                        type="server_error",
                        code="prepare_failed",
                    ) from None
        raise AssertionError("unreachable")

    def _ask(self, task: str, body: bytes | bytearray) -> Any:
        connection = self._ensure()
        try:
            connection.send(Task(task))
            connection.send_bytes(body)
            done = self._receive(connection, MAX_TASK_S)
        except (EOFError, OSError):
            raise WorkerDied(self._bury()) from None
        if done is None:
            self._bury()
            raise ApiError(400, f"the body could not be prepared in {MAX_TASK_S:g} s", code="prepare_timeout")
        if done.error is not None:
            raise done.error
        return done.value

    def _keep_alive(self) -> None:
        """Have a live process; what goes wrong here is met again, and told, by the next task."""
        try:
            if not self._stopping:
                self._ensure()
        except (ApiError, WorkerDied) as error:
            if not self._stopping:  # else it was ended while it started
                log.warning("the process that prepares large bodies does not start: %s", error)

    def _ensure(self) -> Connection:
        """The connection to a process that is ready, which is started if there is none."""
        if self._process is not None and self._process.poll() is not None:
            self._bury()
        if self._connection is not None:
            return self._connection
        if self._stopping:
            raise _stopping()
        connection, theirs = multiprocessing.Pipe()
        try:
            self._process = spawn(_BOOT.format(path=sys.path, fd=theirs.fileno()), theirs.fileno())
        finally:
            theirs.close()
        self._connection = connection
        self.restarts += 1
        try:
            connection.send(self._setup)
            done = self._receive(connection, MAX_START_S)
        except (EOFError, OSError):
            raise WorkerDied(self._bury()) from None
        if done is None or done.error is not None:
            self._bury()
            raise internal_error() if done is None or done.error is None else done.error
        threading.Thread(target=self._watch, args=(self._process,), name="longctx-prepare-watch", daemon=True).start()
        return connection

    def _receive(self, connection: Connection, timeout_s: float) -> Done | None:
        if not connection.poll(timeout_s):
            return None
        done = connection.recv()
        assert isinstance(done, Done)
        return done

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if not self._stopping:
            try:
                self._thread.submit(self._keep_alive)
            except RuntimeError:
                return  # it was shut down in between

    def _bury(self) -> str:
        """Forget the process, which has ended or is ended now; answers how it ended."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        assert process is not None and connection is not None
        connection.close()
        process.kill()
        return describe_exit(process.wait())


class Preparer:
    """All that is done with bodies before the engine hears of them. Belongs to the event loop that starts it.

    A body of up to `SMALL_BODY_BYTES` is done in a thread of this process, in some tens of milliseconds at most and
    with the interpreter to itself only in parts of them. A larger one goes to a worker, which does not hold this
    process up at all and gives way to the engine; workers start in the background, and a body waits for them. What its
    fields say can be checked before, in another thread of this process.
    """

    def __init__(self, settings: ServerSettings, workers: int | None = None):
        self._settings = settings
        self._num_workers = workers or (1 if (os.cpu_count() or 1) < 8 else 2)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="longctx-text")
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="longctx-check")
        self._text: TextSide | None = None
        self._info: ModelInfo | None = None
        self._workers: list[Worker] = []
        self._waiting: dict[Worker, int] = {}
        self._waiting_bytes = 0

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, None before the start and for a model without one. Decoding is safe in any thread."""
        return None if self._text is None else self._text.tokenizer

    @property
    def restarts(self) -> int:
        """How often a worker had to be started again."""
        return sum(max(0, worker.restarts) for worker in self._workers)

    async def start(self, info: ModelInfo) -> None:
        """Load the tokenizer and start the workers. Raises `ModelError` for a tokenizer or template that is broken."""
        settings = self._settings
        load = asyncio.get_running_loop().run_in_executor(
            self._thread, TextSide.load, Path(info.folder), info.longest_request, settings.chat_template
        )
        self._text, self._info = await load, info
        setup = Setup(info, settings.served_name, settings.chat_template, settings.max_choices, NICENESS)
        self._workers = [Worker(setup) for _ in range(self._num_workers)]
        self._waiting = dict.fromkeys(self._workers, 0)

    async def stop(self) -> None:
        """End the workers; what waits for one is refused."""
        self._text = None
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        for thread in (self._thread, self._checks):
            await asyncio.to_thread(thread.shutdown, True, cancel_futures=True)

    async def prepare(self, endpoint: str, body: bytes | bytearray) -> Prepared:
        """The work of a body for "completions", "chat" or "responses". Raises `ApiError`."""
        prepared = await self._do(endpoint, body)
        assert isinstance(prepared, Prepared)
        return prepared

    async def check(self, endpoint: str, body: bytes | bytearray) -> ReplyOptions:
        """How a body wants its answer, its fields checked as `prepare` does, in the time of reading it as JSON, here.

        Its text is not read: what a template or the tokenizer would refuse comes with `prepare`. Raises `ApiError`.
        """
        text, info = self._need_text()
        checked = await self._near(self._checks, prepare, endpoint, body, UnreadText(text), self._settings, info)
        assert isinstance(checked, Prepared)
        return checked.options

    async def tokenize(self, body: bytes | bytearray) -> bytes:
        """The answer of /tokenize as JSON text. Raises `ApiError`."""
        answer: bytes = await self._do("tokenize", body)
        return answer

    async def detokenize(self, body: bytes | bytearray) -> bytes:
        """The answer of /detokenize as JSON text. Raises `ApiError`."""
        answer: bytes = await self._do("detokenize", body)
        return answer

    async def plan(self, body: bytes | bytearray) -> tuple[int, int]:
        """Tokens (prompt and answer) and concurrency that /v1/plan asks about. Raises `ApiError`."""
        tokens, concurrency = await self._do("plan", body)
        return tokens, concurrency

    async def job(self, body: bytes | bytearray) -> Order:
        """What a body of /v1/jobs asks for, its endpoint's part checked too. Raises `ApiError`."""
        order: Order = await self._do("job", body)
        return order

    async def _do(self, task: str, body: bytes | bytearray) -> Any:
        text, info = self._need_text()
        if len(body) > SMALL_BODY_BYTES:
            return await self._do_far(task, body)
        return await self._near(self._thread, perform, task, body, text, self._settings, info)

    def _need_text(self) -> tuple[TextSide, ModelInfo]:
        if self._text is None or self._info is None:
            raise ApiError.from_code("engine_restarting", "the tokenizer is not loaded", retry_after_s=1.0)
        return self._text, self._info

    async def _near(self, thread: ThreadPoolExecutor, function: Callable[..., Any], *args: Any) -> Any:
        """A call in a thread of this process; an error that nobody foresaw is logged and told as the server's."""
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, function, *args)
        except (ApiError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("a body could not be prepared")
            raise internal_error() from None

    async def _do_far(self, task: str, body: bytes | bytearray) -> Any:
        if self._waiting_bytes > WAITING_BODIES * self._settings.max_body_bytes:
            raise ApiError.from_code("queue_full", "too many large bodies wait to be read", retry_after_s=5.0)
        worker = min(self._workers, key=self._waiting.__getitem__)
        self._waiting[worker] += len(body)
        self._waiting_bytes += len(body)
        try:
            return await worker.call(task, body)
        finally:
            self._waiting[worker] -= len(body)
            self._waiting_bytes -= len(body)


def _stopping() -> ApiError:
    return ApiError.from_code("draining", "the server is shutting down")
