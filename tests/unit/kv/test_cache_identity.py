"""Who may share blocks with whom: only requests with the same tokens, namespace and weights."""

from __future__ import annotations

import random

from tests.helpers.kv import CacheDriver


def test_400_prompts_twice_never_meet_anothers_content():
    """vllm-project/vllm#12621, #15297, #54727: colliding block hashes hand out another prompt's keys and values.

    The driver compares every row that is read with the tokens that ought to be there.
    """
    rng = random.Random(1)
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(5, 24))] for _ in range(400)]
    driver = CacheDriver((None, 6), (300, 300), checked=False)
    hits = sum(driver.run(prompt).cached > 0 for prompt in prompts * 2)
    assert hits > 400


def test_a_salt_is_a_namespace():
    """vllm-project/vllm#16016, #17045: other tenants' prompts can be learned from hits."""
    prompt = list(range(20))
    driver = CacheDriver((None, 6), (40, 40))
    assert driver.run(prompt, salt="a").cached == 0
    assert driver.run(prompt, salt="b").cached == 0
    assert driver.run(prompt).cached == 0
    assert driver.run(prompt, salt="").cached == 0
    assert [driver.run(prompt, salt=salt).cached for salt in ("a", "b", None, "")] == [19] * 4


def test_reloaded_weights_find_nothing_old():
    """vllm-project/vllm#3264, #30931, #42125: the old adapter's keys and values under the new one's name.

    Neither what was cached, nor what a running request held or publishes later.
    """
    prompt = list(range(20))
    driver = CacheDriver((None, 6), (40, 40))
    driver.run(prompt)
    driver.run([9, *prompt])
    running = driver.job([8, *prompt])
    assert driver.admit(running)
    driver.step(running, 8)
    driver.cache.clear()
    driver.check()
    driver.prefill(running)
    assert driver.cached() == 0 and driver.match(driver.job([8, *prompt])).tokens == 0
    driver.release(running)
    assert driver.free() == 39 and driver.free(1) == 39
    assert [driver.run(p).cached for p in (prompt, [9, *prompt], [8, *prompt])] == [0, 0, 0]
    assert driver.run(prompt).cached == 19


def test_one_front_token_apart_shares_nothing_and_two_of_four_share_two():
    driver = CacheDriver((None,), (40,))
    driver.run([1, 2, 3, 4])
    assert driver.run([1, 2, 5, 6]).cached == 2
    assert driver.run([9, 2, 3, 4]).cached == 0
    assert driver.run([2, 3, 4]).cached == 0
