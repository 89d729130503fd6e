"""One request's keys and slots."""

from __future__ import annotations

import numpy as np
import pytest

from longctx.kv.table import BlockTable, Column, KeyChain
from longctx.offload.key import chain_key

ROOT = bytes(32)


def test_a_chain_follows_the_requests_own_list():
    tokens = [1, 2, 3, 4, 5]
    chain = KeyChain(ROOT, 4, tokens)
    assert (chain.num_full, chain.num_tokens) == (1, 5)
    first = chain_key(ROOT, [1, 2, 3, 4])
    assert chain.parent(0) == ROOT and chain.key(0) == chain.parent(1) == first
    assert chain.tokens(1).tolist() == [5]
    with pytest.raises(AssertionError, match="block 1 is not full"):
        chain.key(1)
    tokens += [6, 7, 8]
    assert chain.num_full == 2
    assert chain.key(1) == chain_key(first, [5, 6, 7, 8])
    assert chain.tokens(1).tolist() == [5, 6, 7, 8]
    assert chain.tokens(2).tolist() == []


def test_a_blocks_tokens_keep_no_other_block_alive():
    chain = KeyChain(ROOT, 4, list(range(400)))
    assert all(chain.tokens(i).base is None for i in (0, 50, 99))


def test_slots_grow_and_slide():
    column = Column()
    for i in range(50):
        column.extend([3 * i + 1, 3 * i + 2])
    column.clear(1)
    assert len(column) == 100 and column[0] == 1 and column[1] == 0 and column[99] == 149
    assert column.tolist()[:4] == [1, 0, 4, 5]


def test_a_steps_arrays_do_not_change_with_the_table():
    table = BlockTable("a", KeyChain(ROOT, 4, []), 2, num_prompt_tokens=1, cacheable=True, epoch=0)
    table.columns[0].extend([5, 6])
    arrays = table.arrays()
    table.columns[0].clear(0)
    table.columns[0].extend([7])
    assert [a.tolist() for a in arrays] == [[5, 6], []]
    assert all(a.dtype == np.int64 for a in arrays)
    assert table.slots == [[0, 6, 7], []] and table.num_blocks == 3
