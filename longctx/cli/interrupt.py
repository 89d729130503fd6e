"""Ctrl-C as a request to stop, not as an exception."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def cancelling_on_interrupt(cancel: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C inside calls `cancel`; a second one interrupts as usual.

    A flag rather than an exception: raised between two events it could lose one, the last included.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        cancel()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
