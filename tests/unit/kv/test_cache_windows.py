"""Window groups: what is held, what slides out, and which tails are kept so that a hit can end there."""

from __future__ import annotations

import pytest

from longctx.attention.reach import Reach
from tests.helpers.kv import CacheDriver

B = 4


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def document(length: int) -> list[int]:
    return list(range(length))


@pytest.mark.parametrize("window", [1, 3, 4, 5, 9, 16])
def test_a_query_sees_itself_and_window_minus_one_before(window):
    """huggingface/transformers#39408, vllm-project/vllm#3385: one token too wide or too narrow."""
    for tokens in range(40):
        seen = [p for p in range(tokens) if p > tokens - window]
        if seen:
            assert Reach(window).first_block(tokens, B) == seen[0] // B
        assert Reach().first_block(tokens, B) == 0


@pytest.mark.parametrize("window", [1, 4, 5, 6, 16, 17])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_held_blocks_stay_within_the_window(window, chunk):
    """vllm-project/vllm#34568: blocks that slid out are never released."""
    driver = CacheDriver((None, window), (80, 60), chunk=chunk)
    job = driver.job(document(5 * window))
    assert driver.admit(job)
    while (left := 5 * window - job.table.num_computed) > 0:
        n = min(chunk, left)
        assert driver.cache.extend(job.table, job.table.num_computed + n)
        assert driver.held(1) <= ceil_div(window + chunk, B) + 2
        assert driver.step(job, n)
    for token in range(10 * window):
        assert driver.decode(job, token)
        assert driver.held(1) <= ceil_div(window, B) + 2
        assert driver.held(0) == ceil_div(len(job.tokens), B)
    driver.release(job)


@pytest.mark.parametrize(("window", "chunk"), [(5, 8), (6, 8), (9, 3), (16, 8), (4, 1), (17, 7)])
def test_the_smallest_window_pool_finishes_a_long_prompt(window, chunk):
    """vllm-project/vllm#7470, xLLM-AI/xllm#1689: admission and allocation disagree on a window's need."""
    num_slots = ceil_div(window + chunk, B) + 2
    driver = CacheDriver((window,), (num_slots,), chunk=chunk, tail_every=8)
    for name in (1, 2):
        driver.run([name, *document(20 * window)], new=document(2 * window))
    needed = driver.cache.slots_needed(20 * window)[0]
    assert needed <= num_slots - 1
    # A pool that is smaller than the need says so, before anything is allocated.
    small = CacheDriver((window,), (needed,), chunk=chunk)
    job = small.job(document(20 * window))
    assert not small.cache.fits(small.match(job), 20 * window)
    assert small.cache.slots_needed(20 * window)[0] > small.cache.stats()[0].total


def test_running_requests_get_the_windows_they_were_promised():
    """vllm-project/vllm#7470: a later request takes the slots that an admitted one has not allocated yet."""
    driver = CacheDriver((None, 6), (200, 11), chunk=8)
    jobs = [driver.job([name, *document(39)]) for name in range(3)]
    assert [driver.admit(job) for job in jobs] == [True, True, False]
    while jobs[0].table.num_computed < 40:
        assert driver.step(jobs[0], 8) and driver.step(jobs[1], 8)
    driver.release(jobs[0])
    assert driver.admit(jobs[2])


def test_short_prompts_are_promised_the_window_they_may_decode():
    driver = CacheDriver((None, 16), (200, 12))
    jobs = [driver.job([name]) for name in range(3)]
    assert [driver.admit(job) for job in jobs] == [True, True, False]
    for job in jobs[:2]:
        driver.prefill(job)
    for token in range(40):
        assert driver.decode(jobs[0], token) and driver.decode(jobs[1], token)
    # Alone, a request needs no more than its own tokens.
    assert CacheDriver((None, 16), (200, 2)).run([1, 2]).cached == 0


@pytest.mark.parametrize("windows", [(None, 5), (None, 6), (6,), (None, 9, 3)])
@pytest.mark.parametrize("length", [15, 16, 17, 18])
def test_the_same_prompt_again_computes_its_last_token(windows, length):
    """raullenchai/Rapid-MLX#1124: an exact hit on a rotated window feeds the last token twice.

    A long answer in between must not cost the hit.
    """
    driver = CacheDriver(windows, [60] * len(windows))
    tokens = document(length)
    assert driver.run(tokens, new=[100 + i for i in range(30)]).cached == 0
    before = driver.computed
    assert driver.run(tokens).cached == length - 1
    assert driver.computed == before + 1


def test_a_second_question_branches_off_at_the_prompts_last_borders():
    driver = CacheDriver((None, 6), (90, 60))
    driver.run([*document(40), 70, 71, 72, 73, 74], new=[200 + i for i in range(40)])
    assert driver.run([*document(40), 80, 81]).cached == 40


def test_a_hit_may_end_at_every_permanent_tail():
    driver = CacheDriver((None, 6), (90, 60), tail_every=16)
    driver.run(document(100))
    # Kept: the tails of 16, 32, ... 80, and from token 84 on those of the prompt's last borders.
    for shared, expected in ((95, 95), (83, 80), (70, 64), (64, 64), (61, 61), (55, 48), (17, 16), (15, 15), (9, 0)):
        job = driver.job([*document(shared), *range(900, 910)])
        assert driver.match(job).tokens == expected, shared
    assert driver.run([*document(64), 900, 901]).cached == 64


def test_hitting_a_kept_tail_does_not_use_it_up():
    driver = CacheDriver((None, 6), (120, 60), tail_every=16)
    driver.run(document(100))
    for i in range(3):
        assert driver.run([*document(32), *range(300 + 50 * i, 330 + 50 * i)]).cached == 32


def test_a_block_that_slides_out_stays_findable_while_another_holds_it():
    driver = CacheDriver((None, 6), (120, 60), chunk=8)
    first = driver.job(document(80))
    assert driver.admit(first)
    for _ in range(3):
        driver.step(first, 8)
    second = driver.job([*document(24), 500, 501])
    assert driver.admit(second) and second.cached == 24
    driver.prefill(first)
    assert driver.match(driver.job([*document(24), 600])).tokens == 24


def test_a_border_that_a_follower_waits_for_is_kept():
    driver = CacheDriver((None, 6), (90, 30), chunk=8)
    first, follower = driver.job(document(80)), driver.job([*document(20), 500, 501, 502])
    assert driver.admit(first)
    assert driver.cache.pending_owner(follower.chain, driver.match(follower)) == first.id
    driver.cache.keep_border(first.table, 20)
    driver.prefill(first)
    assert driver.match(follower).tokens == 20
    # Without being asked, nobody keeps a tail in the middle of a prompt.
    other = driver.job([*document(40), 600])
    assert driver.match(other).tokens == 20


def test_what_is_not_kept_is_reused_first():
    driver = CacheDriver((None, 6), (90, 30))
    job = driver.job(document(80))
    assert driver.admit(job)
    driver.prefill(job)
    # Tails of the borders 72, 76, 80 and of token 79: positions 67 .. 79, in four blocks; two of them still held.
    assert (driver.held(1), driver.cached(1)) == (2, 2)
    assert driver.free(1) == 29 - 4


def test_full_groups_alone_and_windows_alone_match():
    driver = CacheDriver((None, None), (40, 12))
    driver.run(document(16))
    driver.run([7, *document(35)])
    # The second group lost its end of the first prompt: a hit needs every group.
    assert driver.match(driver.job(document(17))).tokens < 16
    driver = CacheDriver((6,), (40,))
    driver.run(document(64))
    assert driver.run([*document(64), 1]).cached == 64


SINKS = Reach(8, 5)  # two blocks of four


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_sinks_stay_while_the_window_slides(chunk):
    """B34: what slid out is given back; B41: what stays is what was first there, at its own place."""
    driver = CacheDriver((SINKS,), (40,), chunk=chunk)
    job = driver.job(document(50))
    assert driver.admit(job)
    sinks = None
    while (left := 50 - job.table.num_computed) > 0:
        n = min(chunk, left)
        assert driver.cache.extend(job.table, job.table.num_computed + n)
        assert driver.held() <= ceil_div(SINKS.window + chunk, B) + 2 + 2
        assert driver.step(job, n)
        if job.table.num_computed >= 8:
            sinks = sinks or job.table.slots[0][:2]
            assert job.table.slots[0][:2] == sinks and 0 not in sinks
    for token in range(10 * SINKS.window):
        assert driver.decode(job, token)
        assert driver.held() <= ceil_div(SINKS.window, B) + 2 + 2
        assert job.table.slots[0][:2] == sinks
        assert job.table.slots[0][2] == 0
    assert driver.cache.slots_needed(10**6)[0] == ceil_div(SINKS.window + chunk - 2, B) + 1 + 2
    driver.release(job)


def test_requests_share_their_sinks():
    driver = CacheDriver((None, SINKS), (90, 60))
    first = driver.run(document(40))
    jobs = [driver.job([*document(40), name]) for name in (50, 51)]
    for job in jobs:
        assert driver.admit(job) and job.cached == 40
    tables = [job.table.slots[1] for job in jobs]
    assert tables[0][:2] == tables[1][:2] and 0 not in tables[0][:2] and set(tables[0][2:8]) == {0}
    assert first.cached == 0


def test_a_hit_needs_the_sinks():
    """A window's tail alone is no hit: without the sinks the next query would read another block."""
    driver = CacheDriver((SINKS,), (60,))
    job = driver.run(document(40))
    assert driver.match(driver.job(document(41))).tokens == 40
    driver.cache._groups[0].forget_unheld(job.chain.parent(1), job.chain.tokens(1))
    again = driver.job(document(41))
    assert driver.match(again).tokens == 4
    driver.cache._groups[0].forget_unheld(job.chain.parent(0), job.chain.tokens(0))
    assert driver.match(again).tokens == 0
    assert driver.run(document(41)).cached == 0


def test_a_local_chunk_lets_go_of_all_before_it():
    driver = CacheDriver((Reach(local_chunk=16),), (40,), chunk=8)
    job = driver.job(document(40))
    assert driver.admit(job)
    assert job.cached == 0
    for computed in range(8, 41, 8):
        assert driver.step(job, 8)
        assert driver.held() == (computed % 16) // B
    driver.release(job)
    # At a chunk's border nothing before it is read: a hit there needs no block, but is one only if something is read.
    assert [driver.match(driver.job([*document(n), 99])).tokens for n in (40, 38, 33, 32)] == [40, 38, 33, 0]
    assert driver.match(driver.job([7] * 40)).tokens == 0
