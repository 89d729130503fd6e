"""The process that does what takes long with large bodies, at a low priority."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from longctx.errors import LongctxError
from longctx.resident import trim_heap
from longctx.server import logs
from longctx.server.errors import ApiError
from longctx.server.messages import ModelInfo
from longctx.server.text_side import TextSide
from longctx.server.text_tasks import perform

log = logging.getLogger(__name__)

TEMPLATE_S = 30.0


@dataclass(frozen=True)
class Setup:
    """The first message to a worker: of the settings only what it needs, so that no key leaves the server's process."""

    info: ModelInfo
    served_name: str | None
    chat_template: str | None
    max_choices: int
    niceness: int


@dataclass(frozen=True)
class Task:
    """What to do with the bytes that follow this message."""

    name: str


@dataclass(frozen=True)
class Done:
    """A task's value, or why there is none; the first one says that the worker is ready."""

    value: Any = None
    error: ApiError | None = None


def main(fd: int) -> None:
    """Serve the connection `fd` until it closes."""
    # A Ctrl-C goes to the whole group, and stopping is the parent's to decide; it has blocked both for a start.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    faulthandler.enable()
    logs.configure_child()
    connection = Connection(fd)
    with suppress(EOFError, OSError):  # the parent has gone, or wants no more
        serve(connection)
    sys.exit(0)


def serve(connection: Connection) -> None:
    """Load the text side, then do task after task."""
    setup: Setup = connection.recv()
    os.nice(setup.niceness)
    info = setup.info
    try:
        text = TextSide.load(Path(info.folder), info.longest_request, setup.chat_template, TEMPLATE_S)
    except LongctxError as error:
        connection.send(Done(error=ApiError(500, str(error), type="server_error")))
        return
    connection.send(Done())
    while True:
        task: Task = connection.recv()
        body = connection.recv_bytes()
        connection.send(do(task, body, text, setup))
        del body
        trim_heap()


def do(task: Task, body: bytes, text: TextSide, setup: Setup) -> Done:
    """One task; an error that nobody foresaw is the server's and leaves the worker alive."""
    try:
        return Done(perform(task.name, body, text, setup, setup.info))
    except ApiError as error:
        return Done(error=error)
    except MemoryError:
        return Done(error=ApiError(400, "the body needs too much memory to be read"))
    except Exception:
        log.exception("a body could not be prepared")
        return Done(error=internal_error())


def internal_error() -> ApiError:
    """What a client hears of an error that is none of its own."""
    return ApiError(500, "the body could not be prepared: an error of the server", type="server_error", code="internal")
