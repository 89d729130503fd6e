"""One request's side of the cache: the keys of its tokens and the slots that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longctx.kv.pool import NULL_SLOT
from longctx.offload.key import BlockKey, chain_key


class KeyChain:
    """The keys of the full blocks of one request's tokens, computed when first asked for.

    Keeps a reference to the request's own tokens, which may grow at its end and never changes otherwise.
    """

    def __init__(self, root: BlockKey, block_tokens: int, token_ids: Sequence[int]):
        self._root = root
        self._block_tokens = block_tokens
        self._token_ids = token_ids
        self._keys: list[BlockKey] = []
        self._blocks: list[np.ndarray] = []

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def num_full(self) -> int:
        """How many full blocks the tokens make."""
        return len(self._token_ids) // self._block_tokens

    def key(self, i: int) -> BlockKey:
        """The key of full block `i`."""
        assert 0 <= i < self.num_full, f"block {i} is not full"
        while len(self._keys) <= i:
            j = len(self._keys)
            self._keys.append(chain_key(self.parent(j), self.tokens(j)))
        return self._keys[i]

    def prepare(self) -> None:
        """Compute what can be: whoever owns the request now has more time than whoever will ask."""
        if self.num_full:
            self.key(self.num_full - 1)

    def parent(self, i: int) -> BlockKey:
        """The key before block `i`: the root for the first."""
        return self.key(i - 1) if i > 0 else self._root

    def tokens(self, i: int) -> np.ndarray:
        """The tokens of block `i`, int64 [n]; the last block may be partial, or empty."""
        start = i * self._block_tokens
        if i >= self.num_full:
            return np.array(self._token_ids[start : start + self._block_tokens], dtype=np.int64)
        while len(self._blocks) <= i:
            at = len(self._blocks) * self._block_tokens
            # An array per block, not a view: a cache entry that keeps it alive must not keep a whole prompt alive.
            self._blocks.append(np.array(self._token_ids[at : at + self._block_tokens], dtype=np.int64))
        return self._blocks[i]


class Column:
    """One group's slots, block by block: appended at the end, replaced by the null slot when they slide out.

    Blocks below `first_held` are null, but for the first `num_sinks`, which never slide out. `promised` is how many
    slots of a window group admission keeps for this request.
    """

    def __init__(self) -> None:
        self.first_held = 0
        self.num_sinks = 0
        self.promised = 0
        self._buffer = np.zeros(16, dtype=np.int64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, block: int) -> int:
        assert 0 <= block < self._length
        return int(self._buffer[block])

    def extend(self, slots: list[int]) -> None:
        end = self._length + len(slots)
        if end > len(self._buffer):
            grown = np.zeros(max(end, 2 * len(self._buffer)), dtype=np.int64)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : end] = slots
        self._length = end

    def clear(self, block: int) -> None:
        self._buffer[block] = NULL_SLOT

    def array(self) -> np.ndarray:
        """A copy, int64 [blocks]: a step keeps what it was planned with."""
        return self._buffer[: self._length].copy()

    def tolist(self) -> list[int]:
        return self._buffer[: self._length].tolist()

    def held(self) -> list[int]:
        """The slots that are referenced, in order."""
        sinks = self._buffer[: min(self.num_sinks, self.first_held)]
        return [*sinks.tolist(), *self._buffer[self.first_held : self._length].tolist()]


class BlockTable:
    """The slots of one running request, per layer group, and how far they are computed and published.

    Written by `KVCache` alone. Blocks [0, num_shared) were hits and belong to everyone, blocks [num_shared, num_blocks)
    were allocated for this request; blocks [0, num_published) are complete and findable. `borders` are token counts
    before which the window groups' blocks are kept as cache entries.
    """

    def __init__(
        self,
        request_id: str,
        chain: KeyChain,
        num_groups: int,
        *,
        num_prompt_tokens: int,
        cacheable: bool,
        epoch: int,
    ):
        self.request_id = request_id
        self.chain = chain
        self.columns = tuple(Column() for _ in range(num_groups))
        self.num_prompt_tokens = num_prompt_tokens
        self.num_computed = 0
        self.num_shared = 0
        self.num_published = 0
        self.borders: set[int] = set()
        self.cacheable = cacheable
        self.epoch = epoch

    @property
    def num_blocks(self) -> int:
        """Blocks that the table covers, slid-out ones included."""
        return max(map(len, self.columns))

    @property
    def slots(self) -> list[list[int]]:
        return [column.tolist() for column in self.columns]

    def arrays(self) -> tuple[np.ndarray, ...]:
        """One int64 array per group, as a step wants them; later changes of the table do not reach them."""
        return tuple(column.array() for column in self.columns)
