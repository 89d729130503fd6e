"""Runs whose tokens are dictated, and the cold runs that others are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from longctx.engine import Engine
from longctx.params import SamplingParams
from longctx.sampler import SamplingError, sample_rows
from longctx.step import StepRow
from tests.helpers.engine import LogitTap, make_engine, run_all

Script = Callable[[StepRow], int | SamplingError | None]


def dictate(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    """From now on `script(row)` says what is sampled in every engine; None leaves it to the sampler."""

    def dictated(logits_RV: Any, rows: Sequence[StepRow], vocab_limit: int) -> list[int | SamplingError]:
        said = [script(row) for row in rows]
        sampled = sample_rows(logits_RV, rows, vocab_limit)
        return [token if said_token is None else said_token for said_token, token in zip(said, sampled, strict=True)]

    monkeypatch.setattr("longctx.runner.sample_rows", dictated)


def greedy_rows(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[torch.Tensor]:
    """Logits [max_tokens, V] of every prompt's generated tokens, all prompts submitted together."""
    tap = LogitTap(engine)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    requests = [engine.add(ids, params) for ids in prompts]
    run_all(engine)
    return [tap.of(request) for request in requests]


def cold_rows(model: PreTrainedModel, ids: Sequence[int], max_tokens: int, **options: Any) -> torch.Tensor:
    """Logits of one prompt alone on a new engine without a prefix cache and without chunks."""
    return greedy_rows(make_engine(model, prefix_cache=False, **options), [ids], max_tokens)[0]
