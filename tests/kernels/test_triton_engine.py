"""An engine that attends with the Triton kernels, interpreted: the logits of the torch backend, whatever the chunk."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from longctx.params import SamplingParams
from tests.helpers.engine import LogitTap, make_engine, run_all, score_all
from tests.helpers.tiny import make_tiny, random_ids

CASES = [("llama", "auto"), ("gemma2", "int8"), ("gpt_oss", "auto"), ("qwen3", "int4")]
"""Full attention; a soft-cap beside windows; learned sinks beside windows; another head dim. Exact and with codes."""

LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}


@cache
def model_of(kind: str):
    return make_tiny(kind, **(LAYERS if kind in ("gemma2", "gpt_oss") else {}))


def decoded_logits(attention: str, kind: str, fmt: str) -> torch.Tensor:
    """A prompt in two chunks beside another, then three decoded tokens."""
    engine = make_engine(model_of(kind), chunk_tokens=30, kv_format=fmt, attention=attention)
    tap = LogitTap(engine)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    request = engine.add(random_ids(44, seed=1), params)
    engine.add(random_ids(9, seed=2), params)
    run_all(engine)
    return tap.of(request)


@pytest.mark.parametrize(("kind", "fmt"), CASES)
def test_logits_are_those_of_the_torch_backend(kind: str, fmt: str) -> None:
    expected = decoded_logits("torch", kind, fmt)
    # Under a lossy format rounding of 1e-6 may flip a code: one step of it is a 254th of a vector's largest element.
    tolerance = 1e-4 if fmt == "auto" else 5e-3
    assert (decoded_logits("triton", kind, fmt) - expected).abs().max() < tolerance


@pytest.mark.parametrize(("kind", "fmt"), CASES[:2])
def test_logits_do_not_depend_on_the_chunk(kind: str, fmt: str) -> None:
    ids = random_ids(70, seed=3)
    whole, parts = (
        score_all(make_engine(model_of(kind), chunk_tokens=n, kv_format=fmt, attention="triton"), [ids])[0]
        for n in (128, 27)
    )
    np.testing.assert_array_equal(parts, whole)
