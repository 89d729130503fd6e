"""Events: the prompt's logprobs as a compact sequence."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from longctx.events import PromptLogprobs, TokenLogprobs


def test_prompt_logprobs_are_a_sequence_as_long_as_the_prompt() -> None:
    rows = PromptLogprobs(
        np.array([-1.0, -2.0], np.float32), np.array([[3, 1], [2, 0]], np.int32), np.array([[-0.5, -1], [-0.25, -9]])
    )
    first = TokenLogprobs(-1.0, (3, 1), (-0.5, -1.0))
    second = TokenLogprobs(-2.0, (2, 0), (-0.25, -9.0))
    assert len(rows) == 3
    assert list(rows) == [None, first, second]
    assert rows[-1] == second and rows[1:] == (first, second) and rows[0] is None
    for index in (3, -4):
        with pytest.raises(IndexError):
            rows[index]
    assert pickle.loads(pickle.dumps(rows)) == rows
    assert rows != PromptLogprobs(rows.logprobs, rows.top_ids + 1, rows.top_logprobs)
    assert type(first.top_ids[0]) is int and type(first.logprob) is float


def test_a_prompt_of_one_token_has_one_entry_that_is_none() -> None:
    nothing = np.zeros((0, 2))
    assert list(PromptLogprobs(np.zeros(0), nothing, nothing)) == [None]
