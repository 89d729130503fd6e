"""Packed linears: the same values as the dense ones, row by row the same bits, and no second copy in memory."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from longctx.models import linears
from longctx.models.linears import PackedLinear, pack_linears
from tests.helpers.resident import resident_bytes
from tests.helpers.tiny import TINY, hf_logits, hf_logits64, make_tiny, random_ids

# (in, out) of gemma3-270m, smollm2-135m and the tiny models.
REAL = [
    (640, 2048),
    (2048, 640),
    (1024, 640),
    (640, 256),
    (640, 1024),
    (1536, 576),
    (576, 1536),
    (576, 576),
    (576, 192),
]
SMALL = [(64, 96), (96, 64), (64, 128), (64, 32), (64, 320)]


def _dense(in_features: int, out_features: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), REAL + SMALL)
def test_no_row_depends_on_the_number_of_rows(in_features: int, out_features: int, bias: bool) -> None:
    """Measured for every count from 1 to 600 and for 2,048; here those that differ with other kernels, and some more.

    Mutant: MIN_ROWS = 1.
    """
    dense = _dense(in_features, out_features, bias)
    packed = PackedLinear(dense.weight, dense.bias)
    x = torch.randn(600, in_features)
    whole = packed(x)
    torch.testing.assert_close(whole, dense(x), rtol=1e-5, atol=1e-5)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 255, 257, 511, 513, 599):
        for start in (0, 1, 600 - rows):
            assert torch.equal(packed(x[start : start + rows]), whole[start : start + rows]), (rows, start)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (1, 0, 64), (1, 1, 64), (1, 3, 64), (1, 5, 64), (2, 3, 64)])
def test_leading_dimensions_and_strides(shape: tuple[int, ...]) -> None:
    dense = _dense(64, 96, bias=True)
    packed = PackedLinear(dense.weight, dense.bias)
    x = torch.randn(shape)
    out = packed(x)
    assert out.shape == (*shape[:-1], 96) and out.layout == torch.strided
    torch.testing.assert_close(out, dense(x), rtol=1e-5, atol=1e-5)
    if x.numel() > 64:
        strided = torch.randn(*shape[:-1], 128)[..., ::2]
        assert torch.equal(packed(strided), packed(strided.contiguous()))


@pytest.mark.parametrize("kind", TINY)
def test_packed_models_keep_their_logits(kind: str) -> None:
    model, ids = make_tiny(kind, peaky=True), random_ids(100)
    expected, exact = (compute(make_tiny(kind, peaky=True), ids) for compute in (hf_logits, hf_logits64))
    report = pack_linears(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert report.packed == sum(isinstance(module, PackedLinear) for module in model.modules())
    assert ("expert" in report.reason) == (kind in ("mixtral", "qwen3_moe", "gpt_oss", "llama4_text"))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    tolerance = max(1e-4, 3 * float((expected - exact).abs().max()))
    assert (logits - expected).abs().max() <= tolerance


def test_the_dense_weight_is_freed_and_a_tied_embedding_kept() -> None:
    model = make_tiny("qwen2")
    head, gate = weakref.ref(model.lm_head.weight), weakref.ref(model.model.layers[0].mlp.gate_proj.weight)
    embedding = model.model.embed_tokens.weight
    assert head() is embedding
    pack_linears(model)
    assert gate() is None
    assert model.model.embed_tokens.weight is embedding
    assert isinstance(model.lm_head, PackedLinear)
    assert embedding.data_ptr() not in {p.data_ptr() for n, p in model.named_parameters() if "embed" not in n}


def test_mapped_weights_leave_memory_when_they_are_packed(tmp_path: Path) -> None:
    """The mapping lives on for the tied embedding; neither its rows nor the packed weights may stay resident in it."""
    path = tmp_path / "w.safetensors"
    save_file({"weight": torch.randn(2000, 500)}, path)
    with safe_open(path, framework="pt") as tensors:
        weight = tensors.get_tensor("weight")
    model = make_tiny("llama")
    model.lm_head = nn.Linear(500, 2000, bias=False)
    model.lm_head.weight = model.model.embed_tokens.weight = nn.Parameter(weight, requires_grad=False)
    x, expected = torch.randn(5, 500), weight.clone()
    pack_linears(model)
    assert resident_bytes(path) < 0.1 * weight.nbytes
    torch.testing.assert_close(model.lm_head(x), x @ expected.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.model.embed_tokens.weight, expected)


def test_other_linears_are_left_alone_and_named() -> None:
    class QuantizedLinear(nn.Linear):
        pass

    model = make_tiny("llama")
    model.model.layers[0].mlp.up_proj = QuantizedLinear(64, 96, bias=False)
    report = pack_linears(model)
    assert report.plain == 1 and "QuantizedLinear left alone" in report.reason
    assert type(model.model.layers[0].mlp.up_proj) is QuantizedLinear


def test_16_bit_models_stay_plain() -> None:
    model = make_tiny("llama", dtype=torch.bfloat16)
    report = pack_linears(model)
    assert report.packed == 0 and report.plain == 15 and "bfloat16" in report.reason
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda x, packed, bias: _REAL_LINEAR(x, packed, bias) * 1.01, "wrong values"),
        (lambda x, packed, bias: _REAL_LINEAR(x, packed, bias) + 1e-6 * (x.numel() == 7 * 64), "number of rows"),
    ],
)
def test_a_failed_trial_leaves_the_model_unchanged(monkeypatch: pytest.MonkeyPatch, broken, reason: str) -> None:
    monkeypatch.setattr(linears, "_linear", broken)
    model = make_tiny("llama")
    report = pack_linears(model)
    assert report.packed == 0 and reason in report.reason
    assert type(model.lm_head) is nn.Linear


def test_without_the_operators_the_linears_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    report = pack_linears(make_tiny("llama"))
    assert report.packed == 0 and "this torch has no" in report.reason


_REAL_LINEAR = linears._linear
