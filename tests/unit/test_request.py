"""Token ids as one block of numbers: what is taken, what is refused, and that a million cost little."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from longctx.errors import RequestError
from longctx.request import token_buffer

IDS = [5, 0, 319, 5]


@pytest.mark.parametrize(
    "values",
    [
        IDS,
        tuple(IDS),
        pytest.param(iter(IDS), id="iterator"),  # its own name has an address, and differs between test processes
        np.array(IDS, dtype=np.int32),
        np.array(IDS, dtype=np.uint16),
        np.array([*IDS, 7] * 2, dtype=np.int64)[:4],
        np.array([v for i in IDS for v in (i, -1)], dtype=np.int32)[::2],
        np.array(IDS, dtype=">i4"),
        torch.tensor(IDS),
        [np.int64(i) for i in IDS],
    ],
    ids=str,
)
def test_whole_numbers_of_every_kind(values) -> None:
    buffer = token_buffer(values)
    assert buffer.tolist() == IDS
    buffer.append(8)
    assert buffer[-1] == 8 and len(buffer) == 5


@pytest.mark.parametrize(
    "values",
    [[1.0], np.array([1.0]), np.array([True]), np.array([[1, 2]]), ["5"], [None], 7, [2**63], [-(2**63) - 1], [[1]]],
    ids=str,
)
def test_what_would_have_to_be_rounded_or_guessed_is_refused(values) -> None:
    with pytest.raises(RequestError):
        token_buffer(values)


def test_the_buffer_is_a_copy() -> None:
    values = np.array(IDS, dtype=np.int64)
    buffer = token_buffer(values)
    values[0] = 9
    assert buffer[0] == 5


def test_a_million_ids_take_milliseconds() -> None:
    """A tenth of what number by number takes, at most: while they are taken the engine's thread stands still."""
    values = np.arange(1_000_000, dtype=np.int32)

    def seconds(taken) -> float:
        start_s = time.perf_counter()
        token_buffer(taken)
        return time.perf_counter() - start_s

    assert min(seconds(values) for _ in range(5)) < 0.1 * min(seconds(list(values)) for _ in range(2))
