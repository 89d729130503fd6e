"""What one layer group's slots contain: full blocks by key, and every block by its parent and tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from longctx.offload.key import BlockKey, chain_key


@dataclass(frozen=True, slots=True)
class Entry:
    """The findable content of one slot: the rows of `tokens` [n] int64 after the chain `parent`.

    `key` is None for a partial block; its rows are only ever copied out. Nothing is written to a slot while it has an
    entry.
    """

    slot: int
    parent: BlockKey
    tokens: np.ndarray
    key: BlockKey | None


class BlockIndex:
    """Finds slots by content. Knows nothing of references: whoever frees or reuses a slot drops its entry.

    At most one slot has a given key, and no partial entry is the beginning of another entry of the same parent: a
    longer block of the same tokens replaces it, so a superseded partial block cannot be found again.
    """

    def __init__(self) -> None:
        self._slot_of: dict[BlockKey, int] = {}
        self._entries: dict[int, Entry] = {}
        self._children: dict[BlockKey, dict[int, Entry]] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._entries

    def slots(self) -> Iterable[int]:
        return self._entries.keys()

    def entry(self, slot: int) -> Entry:
        return self._entries[slot]

    def find(self, key: BlockKey) -> int | None:
        """The slot of a full block."""
        return self._slot_of.get(key)

    def find_rows(self, parent: BlockKey, tokens: np.ndarray) -> tuple[int, int]:
        """The child of `parent` that begins with the longest run of `tokens`: (slot, rows), (0, 0) if none does."""
        best_slot, best_rows = 0, 0
        for slot, entry in self._children.get(parent, {}).items():
            rows = common_rows(entry.tokens, tokens)
            if rows > best_rows:
                best_slot, best_rows = slot, rows
        return best_slot, best_rows

    def relatives(self, parent: BlockKey, tokens: np.ndarray) -> list[int]:
        """The children of `parent` that begin with the first of `tokens`."""
        return [s for s, entry in self._children.get(parent, {}).items() if common_rows(entry.tokens, tokens)]

    def add(self, slot: int, parent: BlockKey, tokens: np.ndarray, key: BlockKey | None) -> list[int]:
        """Make a slot findable; answers the slots of partial entries that it replaced, which are dropped.

        Nothing is changed if the same content can already be found in another slot.
        """
        assert slot not in self._entries, f"slot {slot} already has an entry"
        replaced = []
        for other in self._children.get(parent, {}).values():
            rows = common_rows(other.tokens, tokens)
            if rows == len(tokens):
                return []
            if rows == len(other.tokens):
                assert other.key is None
                replaced.append(other.slot)
        for other_slot in replaced:
            self.drop(other_slot)
        entry = Entry(slot, parent, tokens, key)
        self._entries[slot] = entry
        self._children.setdefault(parent, {})[slot] = entry
        if key is not None:
            self._slot_of[key] = slot
        return replaced

    def drop(self, slot: int) -> None:
        """Nothing finds this slot any more."""
        entry = self._entries.pop(slot)
        siblings = self._children[entry.parent]
        del siblings[slot]
        if not siblings:
            del self._children[entry.parent]
        if entry.key is not None:
            del self._slot_of[entry.key]

    def check_integrity(self, block_tokens: int) -> None:
        """Recompute both directions of the index from the entries."""
        for slot, entry in self._entries.items():
            assert entry.slot == slot, f"slot {slot} has the entry of slot {entry.slot}"
            assert self._children.get(entry.parent, {}).get(slot) is entry, f"slot {slot} is no child of its parent"
            if entry.key is None:
                assert 0 < len(entry.tokens) < block_tokens, f"slot {slot} is a partial entry of {len(entry.tokens)}"
            else:
                assert len(entry.tokens) == block_tokens, f"slot {slot} is a full entry of {len(entry.tokens)}"
                assert self._slot_of.get(entry.key) == slot, f"slot {slot} is not found under its own key"
                assert entry.key == chain_key(entry.parent, entry.tokens), f"slot {slot} has the key of other tokens"
        num_full = sum(entry.key is not None for entry in self._entries.values())
        assert len(self._slot_of) == num_full, "a key without an entry"
        assert sum(map(len, self._children.values())) == len(self._entries), "a child without an entry"
        for siblings in self._children.values():
            # In sorted order, whatever begins with an entry's tokens follows it.
            ordered = sorted((entry.tokens.tobytes(), slot) for slot, entry in siblings.items())
            for (tokens, slot), (longer, other) in pairwise(ordered):
                assert not longer.startswith(tokens), f"slot {slot} only repeats the beginning of slot {other}"


def common_rows(a: np.ndarray, b: np.ndarray) -> int:
    """The number of equal tokens at the front of two arrays."""
    n = min(len(a), len(b))
    # Most siblings differ at once; the first comparison spares them the array work.
    if n == 0 or a[0] != b[0]:
        return 0
    different = a[:n] != b[:n]
    first = int(different.argmax())
    return first if different[first] else n
