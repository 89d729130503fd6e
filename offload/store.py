"""What every tier below the device is: a keyed store of opaque bytes, with transfers that end in a ticket."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

Buffer = bytes | bytearray | memoryview
"""One segment of a block: the bytes of one layer."""


class TicketState(Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Ticket:
    """One transfer under way. It ends exactly once, DONE or FAILED, and may be waited for from any thread.

    A failure is a value, never an exception: whoever waits falls back to computing the block.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._state = TicketState.PENDING
        self._segments: tuple[Buffer, ...] = ()
        self._error = ""

    @property
    def state(self) -> TicketState:
        return self._state

    @property
    def segments(self) -> tuple[Buffer, ...]:
        """What a `get` brought, in the order asked for; they belong to the caller. Empty for a `put`."""
        assert self._state is TicketState.DONE, f"the transfer is {self._state.value}: {self._error}"
        return self._segments

    @property
    def error(self) -> str:
        """Why the transfer failed, in one line; empty if it did not."""
        return self._error

    def finish(self, segments: Sequence[Buffer] = ()) -> None:
        """The store's side: the transfer succeeded."""
        self._end(TicketState.DONE, tuple(segments), "")

    def fail(self, error: str) -> None:
        """The store's side: the transfer failed, and the bytes are not to be used."""
        self._end(TicketState.FAILED, (), error)

    def wait(self, timeout_s: float | None = None) -> TicketState:
        """Wait until the transfer ends, or `timeout_s` is over; answers the state then."""
        self._ended.wait(timeout_s)
        return self._state

    def _end(self, state: TicketState, segments: tuple[Buffer, ...], error: str) -> None:
        with self._lock:
            assert self._state is TicketState.PENDING, f"a ticket that is {self._state.value} cannot end again"
            self._segments, self._error = segments, error
            self._state = state
        self._ended.set()


@dataclass(frozen=True)
class StoreStats:
    """Counters of one store since it was opened; `bytes` and `blocks` are what it holds now."""

    bytes: int
    cap_bytes: int
    blocks: int
    hits: int
    misses: int
    errors: int


@runtime_checkable
class BlockStore(Protocol):
    """A tier: blocks of equal segments under the names of `offload.key.storage_name`.

    Every implementation passes `StoreContract` of the tests, and argues in its docstring why its asynchronous copies
    are safe. What all promise:

    - Names identify content: a `put` under a name that is there already changes nothing and ends DONE.
    - A `get` brings exactly the bytes that were put, or its ticket ends FAILED: absent (a miss), or damaged (an error,
      and the block is dropped). Neither raises.
    - `bytes` never exceeds `cap_bytes`, for the whole node. To make room, blocks without stored children go first, of
      those the ones whose `value_s` per byte is least: what remains of a chain is its front. A block whose parent is
      not stored is taken like any other, for of window groups only the tails are kept.
    - The payload of a `put` is the store's to read until its ticket ends, and not one moment longer.
    """

    name: str
    cap_bytes: int

    def match(self, names: Sequence[str]) -> int:
        """How many of `names`, from the first on, are there without a gap. Moves nothing and promises nothing."""
        ...

    def get(self, name: str, segments: Sequence[int] | None = None) -> Ticket:
        """Fetch some segments of a block (None: all), in the order given."""
        ...

    def put(self, name: str, parent: str | None, payload: Sequence[Buffer], value_s: float) -> Ticket:
        """Store a block's segments. `parent` is the name of the block before it, `value_s` the seconds it saves.

        FAILED, with nothing evicted, if the block alone is larger than the cap.
        """
        ...

    def drop(self, name: str) -> bool:
        """Remove a block; says whether it was there."""
        ...

    def stats(self) -> StoreStats: ...

    def check_integrity(self) -> None:
        """Recompute every invariant from what is stored; `AssertionError` names what is wrong."""
        ...

    def close(self) -> None:
        """End all transfers and give everything back."""
        ...
