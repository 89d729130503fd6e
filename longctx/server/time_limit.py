"""Ends Python code that takes too long, in whatever thread it runs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TimeLimit(BaseException):
    """The time is up. No `Exception`, so that code which answers for its own errors lets it pass."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeLimit` inside the block if it is not done in time.

    It comes between two steps of Python code: a loop ends, one long call into C goes on to its end. None comes once
    the block has been left.
    """
    thread = threading.get_ident()
    lock = threading.Lock()
    left = False

    def fire() -> None:
        with lock:
            if not left:
                _raise_in(thread, TimeLimit)

    timer = threading.Timer(seconds, fire)
    timer.daemon = True
    try:
        timer.start()
        yield
    finally:
        timer.cancel()
        with lock:
            left = True
            _raise_in(thread, None)  # one that was fired and has not yet come


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    value = ctypes.py_object() if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)
