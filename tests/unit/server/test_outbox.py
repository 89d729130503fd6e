"""The outbox: posting never waits, nothing is lost or reordered, and a reader that is gone ends it."""

from __future__ import annotations

import multiprocessing
import threading

from longctx.server.outbox import Outbox

PATIENCE_S = 20.0


def read_all(connection) -> list:
    messages = []
    try:
        while True:
            messages += connection.recv()
    except EOFError:
        return messages


def test_messages_arrive_in_order_though_nobody_reads_while_they_are_posted() -> None:
    ours, theirs = multiprocessing.Pipe()
    outbox = Outbox(ours)
    for number in range(1000):
        outbox.post((number, b"x" * 10_000))
    received: list = []
    reader = threading.Thread(target=lambda: received.extend(read_all(theirs)))
    reader.start()
    outbox.close(PATIENCE_S)
    ours.close()
    reader.join(PATIENCE_S)
    assert [number for number, _ in received] == list(range(1000))


def test_what_waits_leaves_together() -> None:
    ours, theirs = multiprocessing.Pipe()
    outbox = Outbox(ours)
    # More than the pipe holds: everything after it is still there when it has left.
    outbox.post(b"x" * 10_000_000)
    for number in range(50):
        outbox.post(number)
    batches = [theirs.recv()]
    while 49 not in batches[-1]:
        batches.append(theirs.recv())
    assert [m for batch in batches for m in batch][1:] == list(range(50)) and len(batches) <= 3


def test_a_reader_that_is_gone_ends_it() -> None:
    ours, theirs = multiprocessing.Pipe()
    outbox = Outbox(ours)
    theirs.close()
    outbox.post(b"x" * 1_000_000)
    outbox._thread.join(PATIENCE_S)
    assert not outbox._thread.is_alive()
    outbox.post("nobody hears this")
    outbox.close(0)
