"""A block's life: computed, published, shared, released, reused; and the counts at every point of it."""

from __future__ import annotations

import pytest

from tests.helpers.kv import CacheDriver

B = 4


def full_cache(num_slots: int = 40, chunk: int = 8) -> CacheDriver:
    return CacheDriver((None,), (num_slots,), chunk=chunk)


def prompt(name: int, length: int) -> list[int]:
    return [name * 1000 + i for i in range(length)]


class TestPublish:
    def test_only_what_was_computed_is_found(self):
        """vllm-project/vllm#37152, #7414, GeeeekExplorer/nano-vllm#209: hits on blocks whose content is yet to come."""
        driver = full_cache()
        first, later = driver.job(prompt(1, 20)), driver.job(prompt(1, 22))
        assert driver.admit(first)
        for done in (0, 3, 4, 11, 19, 20):
            driver.step(first, done - first.table.num_computed)
            assert driver.match(later).tokens == done // B * B

    def test_identical_prompts_arriving_together_are_computed_once(self):
        """vllm-project/vllm#37152: six requests share five blocks; five wait until the first has computed them."""
        driver = full_cache(100)
        jobs = [driver.job([*prompt(1, 20), 50 + i]) for i in range(6)]
        first, *others = jobs
        assert driver.admit(first)
        for done in (8, 16):
            driver.step(first, 8)
            for job in others:
                match = driver.match(job)
                assert match.tokens == done and driver.cache.pending_owner(job.chain, match) == first.id
        driver.step(first, 5)
        for job in others:
            match = driver.match(job)
            assert driver.cache.pending_owner(job.chain, match) is None
            assert driver.admit(job) and job.cached == 20
            driver.prefill(job)
        assert driver.computed == 20 + 6
        assert driver.held() == 5 + 6

    def test_when_the_owner_ends_the_block_is_nobodys(self):
        driver = full_cache()
        first, second = driver.job(prompt(1, 20)), driver.job(prompt(1, 20))
        assert driver.admit(first)
        driver.step(first, 6)
        assert driver.cache.pending_owner(second.chain, driver.match(second)) == first.id
        driver.release(first)
        match = driver.match(second)
        assert match.tokens == 6 and driver.cache.pending_owner(second.chain, match) is None

    def test_nobody_waits_for_a_block_that_is_there(self):
        driver = full_cache()
        driver.run(prompt(1, 16))
        second, third = driver.job(prompt(1, 16)), driver.job(prompt(1, 16))
        assert driver.admit(second) and second.cached == 15
        # The second recomputes its last token in a copy of the fourth block.
        assert driver.cache.pending_owner(third.chain, driver.match(third)) is None

    def test_two_that_compute_the_same_blocks_at_once_keep_one_entry(self):
        driver = full_cache()
        jobs = [driver.job(prompt(1, 20)) for _ in range(2)]
        assert all(map(driver.admit, jobs))
        for job in jobs:
            driver.prefill(job)
        assert driver.held() == 10
        for job in jobs:
            driver.release(job)
        assert driver.cached() == 5
        assert driver.run(prompt(1, 20)).cached == 19

    def test_a_request_that_is_not_cacheable_leaves_nothing(self):
        """sgl-project/sglang#36855: a long prompt flagged 'do not cache' eats the pool and stays in it."""
        driver = full_cache(11)
        for _ in range(3):
            job = driver.job(prompt(1, 40), cacheable=False)
            assert driver.admit(job)
            assert driver.cache.pending_owner(driver.job(prompt(1, 40)).chain, driver.match(job)) is None
            driver.prefill(job)
            assert (driver.held(), driver.cached()) == (10, 0)
            driver.release(job)
            assert driver.free() == 10

    def test_release_without_caching_takes_its_whole_path_along(self):
        """What the request added and what it built upon goes, partial blocks too; other paths stay."""
        driver = CacheDriver((None, 6), (40, 40))
        driver.run(prompt(3, 20))
        before = driver.cached(), driver.cached(1)
        driver.run(prompt(1, 14))
        job = driver.job([*prompt(1, 13), *prompt(2, 13)])
        assert driver.admit(job) and job.cached == 13
        driver.prefill(job)
        driver.release(job, cache=False)
        assert (driver.cached(), driver.cached(1)) == before
        assert driver.match(job).tokens == 0

    def test_release_without_caching_leaves_what_others_hold(self):
        driver = full_cache(20)
        driver.run(prompt(1, 20))
        holder, job = driver.job(prompt(1, 20)), driver.job(prompt(1, 20))
        assert driver.admit(holder) and driver.admit(job)
        driver.release(job, cache=False)
        assert driver.match(job).tokens == 16


class TestReuse:
    def test_a_reused_slot_is_not_found_under_its_old_key(self):
        """vllm-project/vllm#4761, ovg-project/kvcached#362: a recycled block serves the wrong prefix."""
        driver = full_cache(9)
        driver.run(prompt(1, 20))
        driver.run(prompt(2, 24))
        driver.run(prompt(3, 12))
        assert driver.run(prompt(1, 20)).cached == 0

    def test_the_tail_of_a_chain_goes_first(self):
        driver = full_cache(9)
        driver.run(prompt(1, 20))
        driver.run(prompt(2, 20))
        assert driver.match(driver.job(prompt(1, 20))).tokens == 12
        assert driver.match(driver.job(prompt(2, 20))).tokens == 19

    def test_the_longest_unused_prompt_goes_first(self):
        driver = full_cache(13)
        for name in (1, 2, 3, 1):
            driver.run(prompt(name, 15))
        driver.run(prompt(4, 15))
        assert [driver.match(driver.job(prompt(n, 15))).tokens > 0 for n in (1, 2, 3)] == [True, False, True]

    def test_slots_without_content_go_before_cache_entries(self):
        driver = full_cache(11)
        driver.run(prompt(1, 16))
        driver.run(prompt(2, 24), cacheable=False)
        assert driver.cached() == 4
        driver.run(prompt(2, 24), cacheable=False)
        assert driver.match(driver.job(prompt(1, 17))).tokens == 16


class TestHits:
    def test_a_prompt_of_whole_blocks_leaves_one_token_to_compute(self):
        """vllm-project/vllm#11186, #17999: a fully cached prompt leaves nothing to take logits from."""
        driver = full_cache()
        for expected in (0, 15, 15):
            assert driver.run(prompt(1, 16)).cached == expected
        assert driver.run([*prompt(1, 16), 7]).cached == 16
        assert driver.run(prompt(1, 15)).cached == 14

    def test_the_shared_last_block_is_copied_while_another_reads_it(self):
        """vllm-project/vllm#11186: the recomputed last token is written into a block that others read."""
        driver = full_cache()
        first = driver.job(prompt(1, 16))
        assert driver.admit(first)
        driver.prefill(first)
        second = driver.job(prompt(1, 16))
        assert driver.admit(second)
        assert [(c.rows, c.src, c.dst) for c in driver.copies] == [
            (3, first.table.slots[0][3], second.table.slots[0][3])
        ]
        assert first.table.slots[0][:3] == second.table.slots[0][:3]
        driver.prefill(second)
        assert driver.decode(first, 5) and driver.decode(second, 6)

    def test_a_second_question_recomputes_its_own_tokens_only(self):
        driver = full_cache()
        driver.run([*prompt(1, 14), 7, 8, 9])
        assert driver.run([*prompt(1, 14), 5, 6]).cached == 14

    def test_the_longest_common_run_is_copied(self):
        driver = full_cache()
        for tokens in ([1, 2, 9], [1, 2, 3, 9], [1, 5]):
            driver.run(tokens)
        assert driver.run([1, 2, 3, 4, 5]).cached == 3

    def test_the_source_of_a_copy_is_not_the_next_to_be_reused(self):
        driver = full_cache(5)
        for name in (1, 2, 3, 4):
            driver.run(prompt(name, 3))
        # The oldest entry is hit; the slot for the copy comes from the second oldest.
        assert driver.admit(driver.job([*prompt(1, 3), 9, 9, 9]))
        assert [driver.match(driver.job([*prompt(n, 3), 8])).tokens for n in (1, 2, 3)] == [3, 0, 3]

    def test_the_source_of_a_copy_is_taken_over_where_nothing_else_is_free(self):
        driver = full_cache(3)
        driver.run(prompt(1, 6))
        first = driver.job([*prompt(1, 6), 7])
        assert driver.admit(first)
        assert first.cached == 6 and driver.copies == [] and driver.free() == driver.cached() == 0
        driver.prefill(first)

    def test_a_superseded_partial_block_does_not_come_back(self):
        """vllm-project/vllm#49125: 1.5 blocks are cached, then filled to 2; the 1.5-block entry must not revive."""
        driver = full_cache()
        driver.run(prompt(1, 6))
        assert driver.cached() == 2
        driver.run(prompt(1, 6), new=[7, 8, 9])
        # The half block is gone: the whole one covers it, and the next one holds a single row.
        assert driver.cached() == 3
        assert driver.run(prompt(1, 6)).cached == 5
        assert driver.run([*prompt(1, 6), 7, 8, 9, 1]).cached == 9

    def test_a_generated_answer_is_found_by_the_next_turn(self):
        driver = full_cache()
        driver.run(prompt(1, 10), new=prompt(2, 9))
        assert driver.run([*prompt(1, 10), *prompt(2, 9), *prompt(3, 5)]).cached == 19

    def test_a_preempted_request_finds_what_it_generated(self):
        """LMCache/LMCache#1969, #2007: the look-up on resume forgets the generated tokens."""
        driver = CacheDriver((None, 6), (7, 12), block_tokens=16)
        old, young = driver.job(prompt(1, 34)), driver.job(prompt(2, 35))
        assert driver.admit(old) and driver.admit(young)
        driver.prefill(old)
        driver.prefill(young)
        for token in range(14):
            assert driver.decode(old, token)
        for token in range(9):
            assert driver.decode(young, token)
        assert not driver.decode(old, 98)
        driver.release(young)
        assert driver.decode(old, 99)
        assert not driver.admit(young)
        # Only the tail of the preempted one was taken, its whole blocks are there.
        driver.release(old)
        assert driver.admit(young)
        assert young.cached == 32
        driver.prefill(young)
        driver.release(young)
        assert driver.run([*young.tokens, 1]).cached == 44


class TestCounts:
    def test_hits_in_the_free_list_are_not_free_as_well(self):
        """vllm-project/vllm#11565, ROCm/ATOM#902: admission counts hit blocks twice, then runs out."""
        driver = full_cache(7)
        driver.run(prompt(1, 16))
        assert (driver.cached(), driver.free()) == (4, 2)
        before = driver.cache.stats()
        # Shares three and needs four more; with the hits taken there are three.
        job = driver.job([*prompt(1, 12), *prompt(2, 16)])
        match = driver.match(job)
        assert match.full_blocks == 3
        assert not driver.cache.fits(match, 28)
        assert not driver.admit(job)
        assert driver.cache.stats() == before
        # One block less is exactly enough, and no exception comes later.
        assert driver.cache.fits(match, 24) and not driver.cache.fits(match, 24, reserve=1)
        job = driver.job([*prompt(1, 12), *prompt(2, 12)])
        assert driver.admit(job)
        driver.prefill(job)
        assert driver.held() == 6

    def test_a_failed_extend_changes_nothing(self):
        driver = CacheDriver((None, 6), (10, 5))
        job = driver.job(prompt(1, 40))
        job.table, _ = driver.cache.admit(job.id, job.chain, driver.match(job), 40)
        driver.running.append(job)
        before = driver.cache.stats()
        assert not driver.cache.extend(job.table, 20)
        assert driver.cache.stats() == before and job.table.num_blocks == 0
        driver.check()

    def test_no_room_ever_is_told_from_no_room_now(self):
        """vllm-project/vllm#39734, #35541: a request that can never fit waits for ever and blocks the others."""
        driver = CacheDriver((None, 6), (50, 9))
        total = [s.total for s in driver.cache.stats()]
        assert driver.cache.slots_needed(63 * B)[0] == 63 > total[0]
        assert driver.cache.slots_needed(49 * B)[0] == 49 == total[0]
        assert driver.cache.slots_needed(63 * B)[1] <= total[1]
        assert not driver.cache.fits(driver.match(driver.job(prompt(1, 63 * B))), 63 * B)
        assert driver.cache.fits(driver.match(driver.job(prompt(1, 49 * B))), 49 * B)
        driver.run(prompt(2, 8))

    @pytest.mark.parametrize("windows", [(None,), (None, 6), (6,)])
    def test_every_end_gives_every_slot_back(self, windows):
        """sgl-project/sglang#6888, #140, sglang-jax#982: two release paths, or none, for the last token's slot.

        Aborts too: after every number of tokens, with slots allocated that were not computed.
        """
        driver = CacheDriver(windows, [30] * len(windows), chunk=3)
        for end in range(34):
            job = driver.job(prompt(end % 5, 20))
            assert driver.admit(job)
            while job.table.num_computed < min(end, 20):
                driver.step(job, min(3, end - job.table.num_computed, 20 - job.table.num_computed))
            for token in range(max(0, end - 20)):
                assert driver.decode(job, token)
            driver.cache.extend(job.table, min(len(job.tokens) + 3, job.table.num_computed + 3))
            driver.release(job)
            assert all(s.held == 0 and s.free + s.cached == s.total for s in driver.cache.stats())
        driver.cache.clear()
        driver.check()
        assert all(s.free == s.total for s in driver.cache.stats())

    def test_aborted_chunks_leave_no_slot_behind(self):
        """sgl-project/sglang#36926, ai-dynamo/dynamo#13855: an abort inside a chunked prefill leaks that chunk."""
        driver = full_cache(12)
        for round_ in range(100):
            job = driver.job(prompt(round_, 40))
            assert driver.admit(job)
            for _ in range(round_ % 5):
                driver.step(job, 8)
            # The next chunk has its slots, and its result never comes.
            driver.cache.extend(job.table, job.table.num_computed + 8)
            driver.release(job)
            assert driver.held() == 0

    def test_a_table_cannot_be_released_twice(self):
        driver = full_cache()
        job = driver.job(prompt(1, 9))
        assert driver.admit(job)
        table = job.table
        driver.release(job)
        with pytest.raises(AssertionError, match="was released"):
            driver.cache.release(table)

    def test_a_stale_match_is_refused_and_changes_nothing(self):
        driver = full_cache(7)
        driver.run(prompt(1, 16))
        job = driver.job(prompt(1, 20))
        match = driver.match(job)
        driver.run(prompt(2, 24))
        before = driver.cache.stats()
        with pytest.raises(AssertionError, match="no longer what was matched"):
            driver.cache.admit(job.id, job.chain, match, 20)
        assert driver.cache.stats() == before
        driver.check()
