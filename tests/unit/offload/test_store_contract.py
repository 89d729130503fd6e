"""What every block store must do. A new tier derives from `StoreContract` and gives it a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from longctx.offload.store import BlockStore, Buffer, StoreStats, Ticket, TicketState

SEGMENTS, SEGMENT_BYTES = 3, 64
BLOCK_BYTES = SEGMENTS * SEGMENT_BYTES


def block(seed: int) -> list[bytes]:
    return [bytes([(seed * 7 + s) % 256]) * SEGMENT_BYTES for s in range(SEGMENTS)]


def put(store: BlockStore, name: str, parent: str | None = None, seed: int = 0, value_s: float = 1.0) -> Ticket:
    ticket = store.put(name, parent, block(seed), value_s)
    ticket.wait(10)
    return ticket


def put_chain(store: BlockStore, prefix: str, length: int, value_s: float = 1.0) -> list[str]:
    names = [f"{prefix}{i}" for i in range(length)]
    for i, name in enumerate(names):
        put(store, name, names[i - 1] if i else None, seed=i, value_s=value_s)
    return names


class StoreContract:
    """Give `make_store(cap_bytes)`; every test ends with the store's own integrity check."""

    def make_store(self, cap_bytes: int) -> BlockStore:
        raise NotImplementedError

    @pytest.fixture
    def store(self):
        store = self.make_store(8 * BLOCK_BYTES)
        yield store
        store.check_integrity()
        store.close()

    def test_is_a_block_store(self, store):
        assert isinstance(store, BlockStore)
        assert store.cap_bytes >= 8 * BLOCK_BYTES

    def test_get_brings_the_bytes_that_were_put(self, store):
        assert put(store, "a", seed=1).state is TicketState.DONE
        ticket = store.get("a")
        assert ticket.wait(10) is TicketState.DONE
        assert [bytes(s) for s in ticket.segments] == block(1)

    def test_get_brings_the_segments_asked_for_in_that_order(self, store):
        put(store, "a", seed=1)
        ticket = store.get("a", [2, 0])
        ticket.wait(10)
        assert [bytes(s) for s in ticket.segments] == [block(1)[2], block(1)[0]]

    def test_match_is_the_leading_run(self, store):
        for name in ("a", "b", "d"):
            put(store, name)
        assert store.match(["a", "b", "c", "d"]) == 2
        assert store.match(["c", "a"]) == 0
        assert store.match([]) == 0

    def test_a_missing_block_fails_and_does_not_raise(self, store):
        ticket = store.get("nobody")
        assert ticket.wait(10) is TicketState.FAILED
        assert ticket.error
        assert store.stats().misses == 1

    def test_putting_a_name_again_changes_nothing(self, store):
        put(store, "a", seed=1)
        before = store.stats()
        assert put(store, "a", seed=1).state is TicketState.DONE
        assert (store.stats().bytes, store.stats().blocks) == (before.bytes, before.blocks)

    def test_a_dropped_block_is_gone(self, store):
        put(store, "a")
        assert store.drop("a")
        assert not store.drop("a")
        assert store.match(["a"]) == 0
        assert store.get("a").wait(10) is TicketState.FAILED
        assert store.stats().blocks == 0

    def test_the_cap_holds_and_the_front_of_a_chain_stays(self, store):
        names = put_chain(store, "c", store.cap_bytes // BLOCK_BYTES)
        for i in range(3):
            put(store, f"other{i}", value_s=2.0)
        stats = store.stats()
        assert stats.bytes <= stats.cap_bytes
        assert stats.bytes >= stats.cap_bytes // 2, "much more was evicted than was needed"
        kept = [store.match([name]) == 1 for name in names]
        assert kept[0], "the front of the chain was evicted before its end"
        assert store.match(names) == sum(kept), "a chain has a gap"

    def test_the_least_valuable_goes_first(self, store):
        dear = put_chain(store, "dear", 4, value_s=100.0)
        cheap = put_chain(store, "cheap", 4, value_s=0.1)
        put_chain(store, "new", 3, value_s=1.0)
        assert store.match(dear) == 4
        assert store.match(cheap) < 4

    def test_a_block_over_the_cap_fails_and_evicts_nothing(self, store):
        put(store, "a")
        ticket = store.put("huge", None, [bytes(store.cap_bytes), bytes(store.cap_bytes)], 1e9)
        assert ticket.wait(10) is TicketState.FAILED
        assert store.match(["a"]) == 1

    def test_stored_bytes_are_nobody_elses(self, store):
        payload = [bytearray(s) for s in block(1)]
        store.put("a", None, payload, 1.0).wait(10)
        payload[0][:] = b"\xff" * SEGMENT_BYTES
        ticket = store.get("a")
        ticket.wait(10)
        assert [bytes(s) for s in ticket.segments] == block(1)

    def test_hits_are_counted(self, store):
        put(store, "a")
        store.get("a").wait(10)
        store.get("a", [1]).wait(10)
        assert (store.stats().hits, store.stats().misses, store.stats().errors) == (2, 0, 0)


@dataclass
class _Stored:
    parent: str | None
    segments: tuple[bytes, ...]
    value_s: float

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.segments))


class DictStore:
    """The contract in its plainest form. Copies are made before `put` and `get` return, so none is ever under way."""

    name = "dict"

    def __init__(self, cap_bytes: int):
        self.cap_bytes = cap_bytes
        self._blocks: dict[str, _Stored] = {}
        self._hits = self._misses = 0

    def match(self, names: Sequence[str]) -> int:
        return next((i for i, name in enumerate(names) if name not in self._blocks), len(names))

    def get(self, name: str, segments: Sequence[int] | None = None) -> Ticket:
        ticket = Ticket()
        stored = self._blocks.get(name)
        if stored is None:
            self._misses += 1
            ticket.fail(f"{name} is not stored")
        else:
            self._hits += 1
            wanted = range(len(stored.segments)) if segments is None else segments
            ticket.finish([bytes(stored.segments[s]) for s in wanted])
        return ticket

    def put(self, name: str, parent: str | None, payload: Sequence[Buffer], value_s: float) -> Ticket:
        ticket = Ticket()
        new = _Stored(parent, tuple(bytes(s) for s in payload), value_s)
        if new.num_bytes > self.cap_bytes:
            ticket.fail(f"{name} is larger than the store")
            return ticket
        self._blocks.setdefault(name, new)
        while self.stats().bytes > self.cap_bytes:
            parents = {b.parent for b in self._blocks.values()}
            leaves = [(b.value_s / b.num_bytes, n) for n, b in self._blocks.items() if n not in parents]
            del self._blocks[min(leaves)[1]]
        ticket.finish()
        return ticket

    def drop(self, name: str) -> bool:
        return self._blocks.pop(name, None) is not None

    def stats(self) -> StoreStats:
        num_bytes = sum(b.num_bytes for b in self._blocks.values())
        return StoreStats(num_bytes, self.cap_bytes, len(self._blocks), self._hits, self._misses, 0)

    def check_integrity(self) -> None:
        assert self.stats().bytes <= self.cap_bytes

    def close(self) -> None:
        self._blocks.clear()


class TestDictStore(StoreContract):
    def make_store(self, cap_bytes: int) -> BlockStore:
        return DictStore(cap_bytes)


class TestTicket:
    def test_ends_once(self):
        ticket = Ticket()
        assert ticket.wait(0) is TicketState.PENDING
        ticket.fail("no space left")
        assert (ticket.wait(), ticket.error) == (TicketState.FAILED, "no space left")
        with pytest.raises(AssertionError):
            ticket.finish()

    def test_a_failed_one_has_no_bytes(self):
        ticket = Ticket()
        ticket.fail("damaged")
        with pytest.raises(AssertionError, match="damaged"):
            _ = ticket.segments
