"""Sends messages from a thread of its own, so that nobody who posts one ever waits for the pipe."""

from __future__ import annotations

import queue
import threading
from multiprocessing.connection import Connection
from typing import Any


class Outbox:
    """The sending side of a connection. What is posted while a message is on its way leaves together, as one list.

    When nobody reads any more the thread ends; what is posted then is lost, and the reading side learns of the end.
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="longctx-outbox", daemon=True)
        self._thread.start()

    def post(self, message: Any) -> None:
        """Queue one message; may be called from any thread."""
        assert message is not None
        self._queue.put(message)

    def close(self, timeout_s: float) -> None:
        """Send what was posted and end, or give up after `timeout_s`."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _main(self) -> None:
        closing = False
        while not closing:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            closing = None in batch
            messages = [message for message in batch if message is not None]
            try:
                if messages:
                    self._connection.send(messages)
            except OSError:
                return
