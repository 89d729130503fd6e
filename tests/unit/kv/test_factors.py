"""Factors of key channels: scores stay, lossy keys lose less, and a file that does not fit is refused by name."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from longctx.errors import LongctxError
from longctx.kv.factors import KeyFactors, KeyStatistics
from longctx.models.inspect import spec_from_config
from longctx.params import SamplingParams
from tests.helpers.engine import LogitTap, make_engine, run_all, score_all
from tests.helpers.tiny import make_tiny, random_ids

IDS = random_ids(120, seed=1)


@cache
def outlier_model(kind: str = "llama") -> PreTrainedModel:
    """One channel of every kv head's keys is fifty times as large, and its queries as much smaller."""
    model = make_tiny(kind, peaky=True)
    dim = model.config.head_dim
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            # Both halves of a rotated pair, so that rotation keeps the channel's size and the scores.
            for channel in (3, 3 + dim // 2):
                attention.k_proj.weight[channel::dim] *= 50.0
                attention.q_proj.weight[channel::dim] /= 50.0
    return model


def calibrated(model: PreTrainedModel) -> KeyFactors:
    engine = make_engine(model)
    statistics = engine.runner.keys = KeyStatistics()
    score_all(engine, [random_ids(200, seed=9)])
    return statistics.factors()


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_outlier_channels_cost_less_with_factors(kv_format: str, tmp_path) -> None:
    model = outlier_model()
    exact = score_all(make_engine(model), [IDS])[0]
    path = str(calibrated(model).save(tmp_path / "factors.safetensors"))
    plain, even = (
        np.abs(score_all(make_engine(model, kv_format=kv_format, kv_factors=file), [IDS])[0] - exact).mean()
        for file in (None, path)
    )
    assert 0 < even < plain / 3, (even, plain)


def test_scores_stay_what_they_were() -> None:
    """Products of queries and keys, for grouped heads too: each query head has its kv head's factors."""
    q_HTD, k_KTD = torch.randn(6, 5, 16).double(), torch.randn(2, 5, 16).double()
    factors = KeyFactors({0: torch.rand(2, 16) + 0.1})
    q, k = factors.apply(0, q_HTD, k_KTD)
    for head in range(6):
        assert torch.allclose(q[head] @ k[head // 3].T, q_HTD[head] @ k_KTD[head // 3].T, rtol=1e-6)
    assert not torch.equal(k, k_KTD)
    assert factors.apply(1, q_HTD, k_KTD)[1] is k_KTD


def test_statistics_even_out_channels() -> None:
    statistics = KeyStatistics()
    k_KTD = torch.ones(2, 10, 4) * torch.tensor([8.0, 4.0, 1e-6, 0.0])
    k_KTD[1] = 0.0
    for part in k_KTD.split(4, 1):
        assert statistics.apply(3, torch.zeros(4, part.shape[1], 4), part)[1] is part
    [(layer, factor_KD)] = statistics.factors()._by_layer.items()
    assert layer == 3 and factor_KD.tolist() == [[1.0, 0.5, 1 / 64, 1 / 64], [1.0] * 4]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_logits_with_factors_are_bit_equal_whatever_the_chunk_and_the_hit(kind: str, tmp_path) -> None:
    model = make_tiny(kind, peaky=True)
    options = {"kv_format": "int4", "kv_factors": str(calibrated(model).save(tmp_path / "f")), "deterministic": True}
    whole = score_all(make_engine(model, **options), [IDS])[0]
    engine = make_engine(model, chunk_tokens=33, **options)
    assert np.array_equal(score_all(engine, [IDS])[0], whole)
    tap = LogitTap(engine)
    requests = []
    for _ in range(2):
        requests.append(engine.add(IDS, SamplingParams(max_tokens=2, ignore_eos=True)))
        run_all(engine)
    assert requests[1].cached_tokens == len(IDS) - 1
    assert torch.equal(tap.of(requests[0]), tap.of(requests[1])) and torch.equal(
        tap.of(requests[0])[0], torch.as_tensor(whole[-1])
    )


def test_exact_formats_are_untouched_and_lossy_keys_have_the_factors_in_their_name(tmp_path, caplog) -> None:
    model = outlier_model()
    path = str(calibrated(model).save(tmp_path / "a.safetensors"))
    other = str(KeyFactors({i: torch.full((2, 16), 2.0) for i in range(2)}).save(tmp_path / "b.safetensors"))

    def root(**options: object) -> bytes:
        return make_engine(model, **options).make_request(IDS, SamplingParams(max_tokens=1)).chain.parent(0)

    assert root() == root(kv_factors=path) and "not used" in caplog.text
    assert np.array_equal(
        score_all(make_engine(model, kv_factors=path), [IDS])[0], score_all(make_engine(model), [IDS])[0]
    )
    assert root(kv_format="v:int8") == root(kv_format="v:int8", kv_factors=path)
    lossy = [root(kv_format="k:int8", kv_factors=file) for file in (None, path, other)]
    assert len(set(lossy)) == 3


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda t: t.pop("layers.1.k_factors"), r"lacks layers.1.k_factors"),
        (
            lambda t: t.update({"layers.2.k_factors": t["layers.0.k_factors"].clone()}),
            r"none of this model's: layers.2",
        ),
        (lambda t: t["layers.1.k_factors"].mul_(math.nan), r"layers.1.k_factors .* hold nan: .* shape \(2, 16\)"),
        (lambda t: t["layers.0.k_factors"][1, 3:4].fill_(-2.0), r"layers.0.k_factors .* hold -2.0: expected positive"),
        (lambda t: t["layers.0.k_factors"][1, 3:4].fill_(0.0), r"hold 0.0"),
        (lambda t: t["layers.0.k_factors"][0, :1].fill_(math.inf), r"hold inf"),
        (lambda t: t.update({"layers.0.k_factors": torch.ones(1)}), r"float32 of shape \(1,\): .* shape \(2, 16\)"),
        (lambda t: t.update({"layers.0.k_factors": torch.ones(2, 16).int()}), r"int32 of shape \(2, 16\)"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(change, error: str, tmp_path) -> None:
    """B53: scales that are NaN, infinite, negative, zero or of another size (sgl-project/sglang#40243)."""
    tensors = {f"layers.{i}.k_factors": torch.ones(2, 16) for i in range(2)}
    change(tensors)
    save_file(tensors, tmp_path / "f.safetensors")
    with pytest.raises(LongctxError, match=error):
        make_engine(make_tiny("llama"), kv_format="int8", kv_factors=str(tmp_path / "f.safetensors"))


def test_files_that_are_none(tmp_path) -> None:
    layers = spec_from_config(make_tiny("llama").config, "tiny").layers
    (tmp_path / "text").write_text("no tensors")
    for name in ("text", "absent"):
        with pytest.raises(LongctxError, match=f"cannot be read from .*{name}"):
            KeyFactors.load(tmp_path / name, layers)
    factors = KeyFactors({i: torch.rand(2, 16) + 1 for i in range(2)})
    with pytest.raises(LongctxError, match="exists"):
        factors.save(tmp_path / "text")
    assert KeyFactors.load(factors.save(tmp_path / "new"), layers).digest == factors.digest
