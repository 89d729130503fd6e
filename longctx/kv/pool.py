"""The slots of one layer group: reference counts and the order in which free ones are reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

NULL_SLOT = 0
"""The null block of every pool: what a table shows where a block slid out of the window. Never allocated."""


class SlotPool:
    """Owns slots 1 .. num_slots-1 of one group; a slot is either held (references > 0) or free.

    Free slots wait in two queues. Those without content are reused first, the last freed first, for its memory is
    warm and untouched memory stays untouched. Those that are cache entries wait behind them in order of use, the
    longest unused is reused first; `on_reuse` is called before such a slot is handed out, so that nothing finds it any
    more. A slot is in exactly one place at any time.
    """

    def __init__(self, num_slots: int, on_reuse: Callable[[int], None]):
        assert num_slots >= 2, f"a pool needs the null slot and one more, got {num_slots}"
        self.num_slots = num_slots
        self._on_reuse = on_reuse
        self._refs = [0] * num_slots
        self._empty = list(range(num_slots - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable(self) -> int:
        return self.num_slots - 1

    @property
    def num_free(self) -> int:
        """Slots that `take` can hand out: empty ones and unreferenced cache entries."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def refs(self, slot: int) -> int:
        return self._refs[slot]

    def take(self) -> int:
        """A slot for one owner; the caller has checked that one is free."""
        assert self.num_free > 0, "no free slot"
        if self._empty:
            slot = self._empty.pop()
        else:
            slot = next(iter(self._cached))
            self._on_reuse(slot)
            del self._cached[slot]
        self._refs[slot] = 1
        return slot

    def acquire(self, slot: int) -> None:
        """One more reference on a cache entry."""
        if self._refs[slot] == 0:
            del self._cached[slot]
        self._refs[slot] += 1

    def release(self, slot: int, cached: bool) -> None:
        """Drop one reference; the last one frees the slot, which stays a cache entry if `cached`."""
        assert self._refs[slot] > 0, f"slot {slot} is released once too often"
        self._refs[slot] -= 1
        if self._refs[slot] == 0:
            if cached:
                self._cached[slot] = None
            else:
                self._empty.append(slot)

    def touch(self, slot: int) -> None:
        """A cache entry was used without being referenced: it is reused last."""
        if slot in self._cached:
            self._cached.move_to_end(slot)

    def forget(self, slot: int) -> None:
        """The slot is no cache entry any more; if it is free, it is reused first."""
        if slot in self._cached:
            del self._cached[slot]
            self._empty.append(slot)

    def check_integrity(self, held: dict[int, int], entries: set[int]) -> None:
        """Compare with counts made from scratch: references per held slot, and the slots that are cache entries."""
        for slot in range(1, self.num_slots):
            assert self._refs[slot] == held.get(slot, 0), (
                f"slot {slot} has {self._refs[slot]} references, the tables hold {held.get(slot, 0)}"
            )
        assert NULL_SLOT not in held and NULL_SLOT not in entries, "the null slot is in use"
        empty, cached = set(self._empty), set(self._cached)
        assert len(empty) == len(self._empty), "a slot is free twice"
        free = {slot for slot in range(1, self.num_slots) if self._refs[slot] == 0}
        for found, wanted, name in ((empty, free - entries, "empty"), (cached, free & entries, "cached")):
            assert found == wanted, f"slots {sorted(found ^ wanted)} are {name} and should not be, or the reverse"
