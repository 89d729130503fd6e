"""The memory words, the workspace and the refusal of a pool that the machine cannot hold."""

import pytest

from longctx.errors import LongctxError
from longctx.kv.memory import (
    SCORE_LOGIT_BYTES,
    Fixed,
    MemoryWords,
    check_machine,
    kv_limit,
    kv_memory_for,
    mlp_width,
    workspace_bytes,
)
from tests.helpers.spec import make_spec

GB = 10**9


def test_the_textbook_device_leaves_64_gb() -> None:
    words = MemoryWords.parse(device_memory="180GB", memory_fraction=0.8)
    assert kv_limit(words, Fixed(100 * GB), 1) == 64 * GB


def test_kv_memory_is_the_pool_itself_whatever_else_is_said() -> None:
    words = MemoryWords.parse("2GiB", "180GB", 0.5)
    assert kv_limit(words, Fixed(100 * GB, 1, 2), 3) == 2 * 2**30
    assert kv_memory_for(words, Fixed(), 10**12, 5) == 2 * 2**30


def test_device_memory_counts_everything_on_the_device() -> None:
    words = MemoryWords(device_memory=10 * GB, memory_fraction=1.0)
    assert kv_limit(words, Fixed(3 * GB, 2 * GB, 1 * GB), 10**15) == 4 * GB
    assert kv_limit(words, Fixed(30 * GB), 10**15) == 0


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.7, 0.9])
def test_a_fraction_is_exact_in_decimals(fraction: float) -> None:
    words = MemoryWords(device_memory=10**16, memory_fraction=fraction)
    assert kv_limit(words, Fixed(), 1) == round(fraction * 10) * 10**15
    assert kv_limit(MemoryWords(device_memory=100, memory_fraction=0.29), Fixed(), 1) == 29


def test_unasked_the_pool_takes_no_more_than_requests_can_use() -> None:
    assert kv_memory_for(MemoryWords(), Fixed(1 * GB), 11 * GB, 3 * GB) == 3 * GB
    assert kv_memory_for(MemoryWords(), Fixed(1 * GB), 11 * GB, 30 * GB) == 9 * GB
    assert kv_memory_for(MemoryWords(memory_fraction=0.5), Fixed(1 * GB), 11 * GB, 3 * GB) == 5 * GB
    assert kv_memory_for(MemoryWords(device_memory=21 * GB), Fixed(1 * GB), 11 * GB, 3 * GB) == 18 * GB


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, float("nan")])
def test_an_absurd_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(LongctxError, match="--memory-fraction"):
        MemoryWords.parse(memory_fraction=fraction)


def test_a_bad_size_names_its_option() -> None:
    with pytest.raises(LongctxError, match="--device-memory '-1'"):
        MemoryWords.parse(device_memory="-1")


def test_a_pool_larger_than_the_machine_is_refused_with_the_split() -> None:
    """vllm-project/vllm#56698, #7256, vllm-project/vllm-ascend#674 (B141): the message has every part and a remedy."""
    fixed = Fixed(weight_bytes=1 * GB, workspace_bytes=2 * GB, process_bytes=GB // 2)
    words = MemoryWords(kv_memory=64 * GB)
    with pytest.raises(LongctxError) as caught:
        check_machine(words, fixed, 64 * GB, 24 * GB)
    text = str(caught.value)
    for part in ("weights 1.00 GB", "KV 64.0 GB", "activations 2.00 GB", "process 500 MB", "67.5 GB", "24.0 GB"):
        assert part in text
    assert f"--kv-memory to at most {20_500_000_000} bytes" in text
    check_machine(words, fixed, 20_500_000_000, 24 * GB)
    with pytest.raises(LongctxError):
        check_machine(words, fixed, 20_500_000_001, 24 * GB)


def test_the_users_own_device_limit_counts_too() -> None:
    words = MemoryWords(kv_memory=GB, device_memory=2 * GB)
    with pytest.raises(LongctxError, match=r"--device-memory is 2\.00 GB"):
        check_machine(words, Fixed(weight_bytes=GB + 1), GB, 24 * GB)
    check_machine(words, Fixed(weight_bytes=GB), GB, 24 * GB)


def test_weights_larger_than_the_machine_say_so() -> None:
    with pytest.raises(LongctxError, match="even without KV it needs 140 GB: use a smaller model"):
        check_machine(MemoryWords(), Fixed(140 * GB), 0, 24 * GB)


def test_the_mlps_width_comes_out_of_the_counts() -> None:
    assert mlp_width(make_spec(intermediate=256)) == 256
    assert mlp_width(make_spec(hidden=96, layers=5, intermediate=1024)) == 1024


def test_the_workspace_is_the_largest_phase_on_top_of_the_residual() -> None:
    spec, chunk = make_spec(intermediate=100_000), 512
    assert workspace_bytes(spec, chunk) == chunk * 4 * (2 * 64 + 3 * 100_000 + 64)
    spec = make_spec(vocab=10_000_000)  # of such logits a step scores one row
    assert workspace_bytes(spec, chunk, 3) == chunk * 4 * 2 * 64 + (3 + 1) * (64 * 4 + 2 * 10_000_000 * 4)
    spec = make_spec(intermediate=1, vocab=2)
    tile = 2048 * 2 * 2 * 16 * 4 + chunk * 2048 * 4
    states = 3 * chunk * 4 * 17 * 4
    projections = chunk * (2 * 64 + 2 * 32 + 32) * 4
    assert workspace_bytes(spec, chunk) == chunk * 4 * 2 * 64 + projections + states + tile


def test_nothing_in_the_workspace_grows_with_tokens_times_vocabulary() -> None:
    spec = make_spec(vocab=250_000)
    assert workspace_bytes(spec, 2048) - workspace_bytes(spec, 1024) == 1024 * 2 * 64 * 4


def test_scored_logits_are_in_the_workspace_up_to_their_bound() -> None:
    spec = make_spec(vocab=250_000)
    assert 2 * SCORE_LOGIT_BYTES <= workspace_bytes(spec, 64) <= 2.2 * SCORE_LOGIT_BYTES
    assert workspace_bytes(spec, 8) < SCORE_LOGIT_BYTES, "no more than a step has tokens"
