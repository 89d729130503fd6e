"""Finding slots by content."""

from __future__ import annotations

import numpy as np
import pytest

from longctx.kv.index import BlockIndex, common_rows
from longctx.offload.key import chain_key

ROOT = bytes(32)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def add_full(index: BlockIndex, slot: int, *tokens: int) -> list[int]:
    return index.add(slot, ROOT, ids(*tokens), chain_key(ROOT, tokens))


@pytest.mark.parametrize(
    ("a", "b", "rows"),
    [((1, 2, 3), (1, 2, 3), 3), ((1, 2), (1, 2, 3), 2), ((1, 9, 3), (1, 2, 3), 1), ((9,), (1,), 0), ((), (1,), 0)],
)
def test_common_rows(a, b, rows):
    assert common_rows(ids(*a), ids(*b)) == common_rows(ids(*b), ids(*a)) == rows


def test_full_blocks_are_found_by_key_until_dropped():
    """vllm-project/vllm#4761: an entry that outlives its slot's content."""
    index = BlockIndex()
    assert add_full(index, 3, 1, 2, 3, 4) == []
    key = chain_key(ROOT, [1, 2, 3, 4])
    assert index.find(key) == 3 and 3 in index
    index.check_integrity(4)
    index.drop(3)
    assert index.find(key) is None and 3 not in index
    assert index.find_rows(ROOT, ids(1, 2, 3, 4)) == (0, 0)
    index.check_integrity(4)


def test_rows_come_from_the_child_that_shares_most():
    index = BlockIndex()
    add_full(index, 1, 1, 2, 8, 8)
    index.add(2, ROOT, ids(1, 2, 3), None)
    add_full(index, 3, 7, 7, 7, 7)
    assert index.find_rows(ROOT, ids(1, 2, 3, 4)) == (2, 3)
    assert index.find_rows(ROOT, ids(1, 2, 8)) == (1, 3)
    assert index.find_rows(ROOT, ids(5, 2, 3)) == (0, 0)
    assert index.find_rows(chain_key(ROOT, [0]), ids(1, 2, 3)) == (0, 0)


def test_a_longer_block_replaces_the_partial_ones_it_covers():
    """vllm-project/vllm#49125: a superseded partial entry comes back to life."""
    index = BlockIndex()
    index.add(1, ROOT, ids(1, 2), None)
    assert index.add(2, ROOT, ids(1, 2), None) == [] and 2 not in index
    assert index.add(2, ROOT, ids(1, 2, 3), None) == [1]
    assert index.add(4, ROOT, ids(1), None) == [] and 4 not in index
    assert index.add(4, ROOT, ids(9), None) == []
    assert add_full(index, 5, 1, 2, 3, 4) == [2]
    assert add_full(index, 6, 1, 2, 3, 4) == [] and 6 not in index
    assert set(index.slots()) == {4, 5}
    index.check_integrity(4)


def test_integrity_finds_a_wrong_key():
    index = BlockIndex()
    index.add(1, ROOT, ids(1, 2, 3, 4), chain_key(ROOT, [1, 2, 3, 5]))
    with pytest.raises(AssertionError, match="slot 1 has the key of other tokens"):
        index.check_integrity(4)
