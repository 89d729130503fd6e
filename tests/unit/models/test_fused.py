"""Fused modules: Hugging Face's values to rounding, each row by itself, and only where a trial agrees."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from longctx.models import fused_rows
from longctx.models.fused import fuse
from longctx.models.fused_rows import FusedMLP, FusedRMSNorm
from longctx.models.linears import pack_linears
from tests.helpers.tiny import TINY, hf_logits, hf_logits64, make_tiny, random_ids

# Row counts that other kernels treat apart: below a vector, odd, around a block.
ROWS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 33, 64, 65)


def _module(kind: str, suffix: str) -> Any:
    model = make_tiny(kind)
    return model.get_submodule(next(name for name, _ in model.named_modules() if name.endswith(suffix)))


@pytest.mark.parametrize("kind", TINY)
def test_fused_models_keep_their_logits(kind: str) -> None:
    model, ids = make_tiny(kind, peaky=True), random_ids(100)
    expected, exact = (compute(make_tiny(kind, peaky=True), ids) for compute in (hf_logits, hf_logits64))
    pack_linears(model)
    report = fuse(model)
    assert not report.left
    assert any("Attention" in name for name in report.fused) == (kind not in ("gpt_oss", "olmo2", "llama4_text"))
    assert any("RMSNorm" in name for name in report.fused) == (kind != "llama4_text")
    assert any("MLP" in name for name in report.fused) == (
        kind not in ("phi3_longrope", "mixtral", "qwen3_moe", "gpt_oss", "llama4_text")
    )
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    tolerance = max(1e-4, 3 * float((expected - exact).abs().max()))
    assert (logits - expected).abs().max() <= tolerance


@pytest.mark.parametrize("width", [16, 60, 64, 576, 640])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss"])
def test_norm_rows(kind: str, width: int) -> None:
    """Mutant: Gemma's 1 + weight left out, or eps outside the root."""
    source = _module(kind, "input_layernorm")
    source.weight = nn.Parameter(torch.randn(width) * 0.3 + 1.0, requires_grad=False)
    norm = FusedRMSNorm(source)
    x = torch.randn(1, 65, width) * torch.logspace(-3, 2, 65)[:, None]  # small rows feel eps
    whole = norm(x)
    expected = source(x)
    assert ((whole - expected).abs() <= 1e-6 * expected.abs().amax(-1, keepdim=True)).all()
    for rows in ROWS:
        assert torch.equal(norm(x[:, -rows:]), whole[:, -rows:])
    assert norm(x[:, :0]).shape == (1, 0, width)


def test_head_norms_take_transposed_views() -> None:
    source = _module("gemma3_text", "q_norm")
    norm = FusedRMSNorm(source)
    heads = torch.randn(1, 7, 4, 16).transpose(1, 2)
    out = norm(heads)
    torch.testing.assert_close(out, source(heads), rtol=1e-5, atol=1e-6)
    assert out.stride() == heads.stride()
    assert torch.equal(norm(heads.contiguous()), out)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_mlp_rows(kind: str) -> None:
    """Mutant: the other activation, or gate and up exchanged."""
    model = make_tiny(kind, mlp_bias=True) if kind == "llama" else make_tiny(kind)
    source = copy.deepcopy(model.model.layers[0].mlp)
    pack_linears(model)
    mlp = FusedMLP(model.model.layers[0].mlp)
    x = torch.randn(1, 65, 64) * 5.0
    whole = mlp(x)
    torch.testing.assert_close(whole, source(x), rtol=1e-4, atol=1e-5 * float(source(x).abs().max()))
    for rows in ROWS:
        assert torch.equal(mlp(x[:, -rows:]), whole[:, -rows:])
    assert mlp(x[:, :0]).shape == (1, 0, 64)


def test_unknown_classes_stay() -> None:
    class OtherNorm(nn.Module):
        pass

    model = make_tiny("llama")
    model.model.norm = OtherNorm()
    fuse(model)
    assert isinstance(model.model.norm, OtherNorm)


def test_a_known_name_with_other_arithmetic_is_left_alone() -> None:
    class LlamaRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(64), requires_grad=False), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.abs().mean(-1, keepdim=True)) * self.weight

    model = make_tiny("qwen3")
    model.model.norm = LlamaRMSNorm()
    report = fuse(model)
    assert report.left["LlamaRMSNorm"] == "a trial gave other values"
    assert isinstance(model.model.norm, LlamaRMSNorm)


def test_rows_that_depend_on_their_number_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fused_rows.rms_norm_rows

    def uneven(x: Any, scale: Any, eps: float, out: Any) -> None:
        real(x, scale, eps, out)
        out *= 1.0 + 1e-6 * (len(x) == 3)

    monkeypatch.setattr(fused_rows, "rms_norm_rows", uneven)
    assert "depended on their number" in fuse(make_tiny("llama")).left["LlamaRMSNorm"]


def test_plain_linears_and_16_bits_are_left_alone() -> None:
    assert fuse(make_tiny("llama")).left == dict.fromkeys(("LlamaAttention", "LlamaMLP"), "its linears are not packed")
    report = fuse(make_tiny("llama", dtype=torch.bfloat16))
    assert not report.fused and "bfloat16" in report.left["LlamaRMSNorm"]


def test_an_unknown_activation_is_left_alone() -> None:
    model = make_tiny("llama", hidden_act="relu")
    pack_linears(model)
    assert fuse(model).left == {"LlamaMLP": "activation relu is not known"}
