"""Options of a request and of an engine: a value of the wrong kind is refused where it is given, not inside a step."""

from __future__ import annotations

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
    ],
)
def test_sampling_params_of_the_wrong_kind_are_refused(options) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        SamplingParams(**options)


def test_numbers_of_other_libraries_are_taken() -> None:
    params = SamplingParams(np.int64(5), np.float32(0.5), np.int32(3), np.float64(0.9), seed=np.uint64(2**64 - 1))
    assert params == SamplingParams(5, 0.5, 3, 0.9, seed=2**64 - 1)
    assert type(params.max_tokens) is int and type(params.temperature) is float


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
