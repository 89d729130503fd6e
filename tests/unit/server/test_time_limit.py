"""A block of Python that takes too long is ended, in any thread, and never after it was left."""

from __future__ import annotations

import threading
import time

import pytest

from longctx.server.time_limit import TimeLimit, time_limit


def spin() -> None:
    while True:
        pass


def test_an_endless_loop_ends() -> None:
    with pytest.raises(TimeLimit), time_limit(0.05):
        spin()


def test_it_ends_in_its_own_thread_only() -> None:
    ended = []

    def work() -> None:
        try:
            with time_limit(0.05):
                spin()
        except TimeLimit:
            ended.append(threading.current_thread())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert ended == [thread]


def test_code_that_answers_for_its_errors_lets_it_pass() -> None:
    with pytest.raises(TimeLimit), time_limit(0.05):
        try:
            spin()
        except Exception:
            pytest.fail("it was taken for an error")


def test_what_is_in_time_is_left_alone() -> None:
    for _ in range(300):
        with time_limit(30):
            pass
    with pytest.raises(ValueError, match="own"), time_limit(10):
        raise ValueError("own")


def test_a_limit_that_runs_out_at_the_very_end_does_not_come_later() -> None:
    for i in range(200):
        try:
            with time_limit(0.001):
                end_s = time.perf_counter() + 0.0008 + i % 5 * 0.0001
                while time.perf_counter() < end_s:
                    pass
        except TimeLimit:
            pass
        for _ in range(100):
            pass
