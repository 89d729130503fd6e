"""The slots of one group: counts, order of reuse, and the check that recomputes both."""

from __future__ import annotations

import pytest

from longctx.kv.pool import NULL_SLOT, SlotPool


@pytest.fixture
def reused() -> list[int]:
    return []


@pytest.fixture
def pool(reused) -> SlotPool:
    return SlotPool(5, reused.append)


def test_the_null_slot_is_never_handed_out(pool):
    assert (pool.num_usable, pool.num_free) == (4, 4)
    assert sorted(pool.take() for _ in range(4)) == [1, 2, 3, 4]
    with pytest.raises(AssertionError, match="no free slot"):
        pool.take()


def test_untouched_memory_stays_untouched(pool):
    first = pool.take()
    pool.release(first, cached=False)
    assert pool.take() == first


def test_empty_slots_go_before_cache_entries_and_these_by_use(pool, reused):
    a, b, c, d = (pool.take() for _ in range(4))
    for slot in (a, b, c):
        pool.release(slot, cached=True)
    pool.release(d, cached=False)
    pool.touch(a)
    assert [pool.take() for _ in range(4)] == [d, b, c, a]
    assert reused == [b, c, a]


def test_a_shared_slot_is_free_after_its_last_release(pool):
    slot = pool.take()
    pool.acquire(slot)
    pool.release(slot, cached=True)
    assert (pool.refs(slot), pool.num_cached) == (1, 0)
    pool.release(slot, cached=True)
    assert (pool.num_free, pool.num_cached) == (4, 1)
    pool.acquire(slot)
    assert (pool.num_free, pool.num_cached) == (3, 0)


def test_a_slot_is_not_released_twice(pool):
    """sgl-project/sglang#6888, #140: two release paths free the same slot."""
    slot = pool.take()
    pool.release(slot, cached=False)
    with pytest.raises(AssertionError, match=f"slot {slot} is released once too often"):
        pool.release(slot, cached=False)


def test_a_forgotten_entry_is_reused_first(pool, reused):
    a, b = pool.take(), pool.take()
    pool.release(a, cached=True)
    pool.release(b, cached=True)
    pool.forget(b)
    pool.forget(b)
    assert (pool.num_cached, pool.take(), reused) == (1, b, [])


def test_integrity_names_the_slot(pool):
    slot = pool.take()
    pool.check_integrity({slot: 1}, set())
    with pytest.raises(AssertionError, match=f"slot {slot} has 1 references, the tables hold 0"):
        pool.check_integrity({}, set())
    pool.release(slot, cached=True)
    pool.check_integrity({}, {slot})
    with pytest.raises(AssertionError, match=f"slots \\[{slot}\\] are"):
        pool.check_integrity({}, set())
    with pytest.raises(AssertionError, match="null slot"):
        pool.check_integrity({NULL_SLOT: 1}, {slot})
