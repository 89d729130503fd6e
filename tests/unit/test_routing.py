"""The routing score: cache and queue in one unit, seconds."""

from __future__ import annotations

import pytest

from longctx.routing import Replica, choose_replica, expected_ttft_s


def prefill_s(start: int, tokens: int) -> float:
    return tokens / 100 + start * tokens / 1e6


def test_a_hit_is_worth_what_it_saves_and_a_queue_costs_what_it_costs() -> None:
    cold, warm = Replica(0, 0.0), Replica(900, 0.0)
    assert choose_replica([cold, warm], 1000, prefill_s) == 1
    saved_s = expected_ttft_s(cold, 1000, prefill_s) - expected_ttft_s(warm, 1000, prefill_s)
    assert choose_replica([cold, Replica(900, saved_s * 0.9)], 1000, prefill_s) == 1
    assert choose_replica([cold, Replica(900, saved_s * 1.1)], 1000, prefill_s) == 0


def test_of_equals_the_one_that_was_given_least_is_taken() -> None:
    assert choose_replica([Replica(0, 0.0, 500), Replica(0, 0.0, 100), Replica(0, 0.0, 100)], 10, prefill_s) == 1


def test_the_last_token_is_always_computed() -> None:
    assert expected_ttft_s(Replica(1000, 0.0), 1000, prefill_s) == prefill_s(999, 1)


def test_nobody_to_choose_is_said() -> None:
    with pytest.raises(ValueError, match="no replica"):
        choose_replica([], 10, prefill_s)
