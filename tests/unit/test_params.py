"""Options of a request and of an engine: a value of the wrong kind is refused where it is given, not inside a step."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from longctx.config import EngineConfig
from longctx.errors import LongctxError, RequestError
from longctx.params import SamplingParams


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 2.5},
        {"max_tokens": "5"},
        {"max_tokens": 0},
        {"top_k": 2.5},
        {"top_k": None},
        {"seed": 1.5},
        {"seed": -1},
        {"temperature": None},
        {"temperature": "0.5"},
        {"temperature": float("nan")},
        {"top_p": None},
        {"top_p": 0.0},
        {"stop": 5},
        {"stop": None},
        {"stop": b"text"},
        {"stop": ["a", 3]},
        {"stop": [""]},
        {"max_tokens": True},
        {"temperature": False},
        {"temperature": 10**400},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"min_p": None},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": float("inf")},
        {"presence_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": "1"},
        {"logit_bias": None},
        {"logit_bias": 5},
        {"logit_bias": [1, 2]},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: "1"}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {5: 100.5}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": dict.fromkeys(range(20_000), 1.0)},
        {"logprobs": -1},
        {"logprobs": 21},
        {"logprobs": True},
        {"logprobs": 1.0},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 10**9},
        {"prompt_logprobs": "1"},
    ],
)
def test_sampling_params_of_the_wrong_kind_are_refused(options) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        SamplingParams(**options)


def test_numbers_of_other_libraries_are_taken() -> None:
    params = SamplingParams(np.int64(5), np.float32(0.5), np.int32(3), np.float64(0.9), seed=np.uint64(2**64 - 1))
    assert params == SamplingParams(5, 0.5, 3, 0.9, seed=2**64 - 1)
    assert type(params.max_tokens) is int and type(params.temperature) is float


def test_a_bias_is_kept_as_pairs_in_order_whatever_it_came_as() -> None:
    params = SamplingParams(logit_bias={7: 1, np.int64(3): np.float32(-100.0)})  # type: ignore[arg-type]
    assert params.logit_bias == ((3, -100.0), (7, 1.0))
    assert params == SamplingParams(logit_bias=((7, 1.0), (3, -100.0)))
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))


def test_a_message_does_not_repeat_a_huge_value() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(logit_bias="x" * 10_000_000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "options",
    [
        {"block_tokens": 0},
        {"block_tokens": 1.5},
        {"block_tokens": "16"},
        {"tail_every": -3},
        {"max_running": "8"},
        {"max_running": 1.5},
        {"max_queue": 0},
        {"chunk_tokens": 0},
        {"step_seconds": float("nan")},
        {"itl_target_s": "1"},
    ],
)
def test_settings_of_the_wrong_kind_are_refused(options) -> None:
    with pytest.raises(LongctxError, match=next(iter(options))):
        EngineConfig.from_options("model", **options)


def test_lengths_may_be_text() -> None:
    scheduler = EngineConfig.from_options("model", chunk_tokens="1K", max_chunk_tokens="4K").scheduler
    assert (scheduler.chunk_tokens, scheduler.max_chunk_tokens) == (1024, 4096)
