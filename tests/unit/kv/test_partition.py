"""The static partition of the pool, and the one test of what fits that admission and plan share."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.attention.reach import Reach
from longctx.errors import DoesNotFitError, LongctxError, RequestError
from longctx.kv.groups import LayerGroup
from longctx.kv.partition import Partition, PoolShape, admit, ceil_div, partition
from longctx.kv.sizes import geometry_groups
from longctx.quant.formats import FORMATS


def groups(layers: int = 2, window: int | None = None, window_layers: int | None = None) -> tuple[LayerGroup, ...]:
    return geometry_groups(layers, 1, 16, FORMATS["fp32"], 16, window, window_layers)


FULL, MIXED, WINDOW = groups(2), groups(6, 40, 5), groups(2, 40)
BLOCK_BYTES = 2 * 16 * 16 * 4  # K and V, 16 tokens, head dim 16, fp32: one layer


def full_pool(blocks: int, max_model_len: int = 4096) -> Partition:
    return partition(FULL, (1 + blocks) * 2 * BLOCK_BYTES, 4, 32, max_model_len)


def test_a_full_model_gets_all_but_the_null_block() -> None:
    part = full_pool(48)
    assert part.num_slots == (49,)
    assert part.tokens == 48 * 16
    assert part.pool_bytes == 49 * 2 * BLOCK_BYTES


def test_window_groups_get_what_running_requests_and_tails_need() -> None:
    part = partition(MIXED, 4_000_000, max_running=3, max_chunk_tokens=32, max_model_len=4096, tail_every=64)
    tail = 3  # ceil(39 / 16)
    need = 5 + 2  # ceil((40 + 32) / 16) + 2
    history = part.history_blocks
    assert part.num_slots == (1 + history, 1 + 3 * (need + tail + 2) + tail * ceil_div(history * 16, 64))
    assert part.pool_bytes <= 4_000_000 < part.shape.pool_bytes(history + 1)


def test_sinks_cost_their_blocks_once_per_request_and_once_per_tail() -> None:
    window, sinks = (
        PoolShape((replace(g, key=replace(g.key, sinks=n)),), 3, 32, 4096, 64)
        for n, g in ((0, WINDOW[0]), (17, WINDOW[0]))
    )
    assert sinks.window_need(Reach(40, 17)) == window.window_need(Reach(40)) + 2
    assert sinks.slots(0)[0] == window.slots(0)[0] + 3 * (2 + 2)
    assert sinks.slots(4)[0] == window.slots(4)[0] + 3 * (2 + 2) + 1, "a tail and its sinks, at most what is there"


def test_a_local_chunk_needs_what_a_window_of_its_size_needs() -> None:
    chunked = replace(WINDOW[0].key, window=None, local_chunk=WINDOW[0].window)
    shape = PoolShape((replace(WINDOW[0], key=chunked),), 3, 32, 4096, 64)
    assert not shape.has_full and shape.slots(9) == PoolShape(WINDOW, 3, 32, 4096, 64).slots(9)


def test_a_window_longer_than_the_longest_request_needs_no_more_blocks_than_that() -> None:
    shape = PoolShape(groups(2, 100_000), 1, 32, 64)
    assert shape.window_need(Reach(100_000)) == 4 + 1
    wide, narrow = PoolShape(groups(2, 4000), 1, 32, 10**6, 64), PoolShape(groups(2, 64), 1, 32, 10**6, 64)
    assert wide.slots(100)[0] - wide.slots(0)[0] == narrow.slots(100)[0] - narrow.slots(0)[0] == 100, "tails overlap"


def test_a_window_only_model_has_no_limit_of_history() -> None:
    part = partition(WINDOW, 1_000_000, max_running=2, max_chunk_tokens=32, max_model_len=10**6)
    assert part.holds(10**6, 2) and not part.holds(10**6, 3)
    assert part.longest_request == 10**6
    assert part.pool_bytes <= 1_000_000
    roomy = partition(WINDOW, 10**12, max_running=2, max_chunk_tokens=32, max_model_len=4096)
    assert roomy.pool_bytes == roomy.shape.pool_bytes(2 * 256), "no more tails than two requests can leave"


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([FULL, MIXED, WINDOW]),
    memory=st.integers(0, 30_000_000),
    running=st.integers(1, 9),
    chunk=st.integers(1, 300),
    length=st.integers(1, 5000),
    tail_every=st.sampled_from([16, 64, 8192]),
)
def test_a_pool_stays_in_its_memory_and_holds_what_it_says(
    kind: tuple[LayerGroup, ...], memory: int, running: int, chunk: int, length: int, tail_every: int
) -> None:
    shape = PoolShape(kind, running, chunk, length, tail_every)
    if memory < shape.min_kv_bytes:
        with pytest.raises(LongctxError, match="minimum pool"):
            partition(kind, memory, running, chunk, length, tail_every)
        return
    part = partition(kind, memory, running, chunk, length, tail_every)
    assert part.pool_bytes <= memory
    assert part.pool_bytes == sum(n * g.layout.block_bytes for n, g in zip(part.num_slots, kind, strict=True))
    if shape.has_full:
        assert shape.pool_bytes(part.history_blocks + 1) > memory, "nothing is left over"
    assert part.holds(part.longest_request)
    assert not part.holds(part.longest_request + 1)


@pytest.mark.parametrize("kind", [FULL, MIXED])
def test_the_bytes_for_a_demand_are_exactly_enough(kind: tuple[LayerGroup, ...]) -> None:
    shape = PoolShape(kind, 3, 32, 4096)
    needed = shape.bytes_for(1000, 3)
    assert Partition.within(shape, needed).holds(1000, 3)
    assert not Partition.within(shape, needed - 1).holds(1000, 3)


def test_windows_alone_need_the_same_bytes_at_any_length() -> None:
    shape = PoolShape(WINDOW, 3, 32, 10**6)
    assert shape.bytes_for(1000, 3) == shape.bytes_for(10**6, 3) == shape.min_kv_bytes
    assert Partition.within(shape, shape.min_kv_bytes).holds(10**6, 3)
    assert shape.roomy_bytes(10**6, 3) > 2 * shape.roomy_bytes(10**5, 3)


def test_too_little_memory_names_both_numbers_and_both_remedies() -> None:
    shape = PoolShape(MIXED, 8, 32, 4096)
    one = replace(shape, max_running=1)
    with pytest.raises(LongctxError) as caught:
        partition(MIXED, one.min_kv_bytes, 8, 32, 4096)
    assert str(one.min_kv_bytes) in str(caught.value)
    assert f"--kv-memory to at least {shape.min_kv_bytes}" in str(caught.value)
    assert "only 1 running" in str(caught.value)
    partition(MIXED, shape.min_kv_bytes, 8, 32, 4096)


def refusal(part: Partition, prompt: int, max_tokens: int | None) -> str:
    error = admit(part, prompt, max_tokens)
    assert isinstance(error, RequestError)
    assert "\n" not in str(error)
    return str(error)


def test_a_request_that_can_never_fit_is_refused_and_a_small_one_is_not() -> None:
    """vllm-project/vllm#39734, #35541, inference-sim/inference-sim#373 (B100): a pool of 48 blocks beside the null."""
    part = full_pool(48)
    text = refusal(part, 63 * 16, 1)
    assert isinstance(admit(part, 63 * 16, 1), DoesNotFitError)
    assert "needs 63 blocks" in text and "has 48" in text
    assert f"shorten the prompt by {63 * 16 - 48 * 16} tokens" in text
    assert f"--kv-memory to at least {64 * 2 * BLOCK_BYTES} bytes" in text
    text = refusal(part, 40 * 16, 20 * 16)
    assert "needs 60 blocks" in text and f"max_tokens to at most {8 * 16 + 1}" in text
    assert admit(part, 16, 16) is None


def test_the_changes_an_error_names_are_the_smallest_that_work() -> None:
    part = full_pool(48)
    assert admit(part, 48 * 16, 1) is None, "the last token is never stored"
    assert admit(part, 48 * 16 + 1, 1) is not None
    assert admit(part, 40 * 16, 8 * 16 + 1) is None
    assert admit(part, 40 * 16, 8 * 16 + 2) is not None
    assert admit(partition(FULL, 64 * 2 * BLOCK_BYTES, 4, 32, 4096), 63 * 16, 1) is None
    assert admit(partition(FULL, 64 * 2 * BLOCK_BYTES - 1, 4, 32, 4096), 63 * 16, 1) is not None


def test_near_the_models_limit_nothing_is_cut_in_silence() -> None:
    """sgl-project/sglang#33814 (B102): 64 positions, a prompt of 50: 14 tokens can be generated and 15 cannot."""
    part = full_pool(48, max_model_len=64)
    assert admit(part, 50, 14) is None
    text = refusal(part, 50, 15)
    assert "= 65 tokens, the model has 64 positions: set max_tokens to at most 14" in text
    assert not isinstance(admit(part, 50, 15), DoesNotFitError)


def test_a_prompt_longer_than_the_model_says_by_how_much() -> None:
    part = full_pool(48, max_model_len=64)
    assert "has 70 tokens and the model 64 positions: shorten the prompt by 7 tokens" in refusal(part, 70, 5)
    assert "shorten the prompt by 1 tokens" in refusal(part, 64, None)
    assert admit(part, 63, None) is None


def test_an_empty_prompt_is_refused() -> None:
    assert "empty" in refusal(full_pool(48), 0, 5)


def test_without_max_tokens_only_room_for_one_token_is_asked() -> None:
    part = full_pool(48)
    assert admit(part, 48 * 16, None) is None
    assert "blocks" in refusal(part, 48 * 16 + 1, None)
