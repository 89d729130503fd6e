"""Int8 linears: errors that follow from the format, exact integers, rows that know nothing of each other."""

# Shape legend: N rows, I in features, O out features, G groups of inputs.
from __future__ import annotations

import copy
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from longctx.errors import ModelError
from longctx.models import int8_linears
from longctx.models.fused import fuse
from longctx.models.int8_codes import int8_bytes, join, quantize_weight
from longctx.models.int8_kernel import GELU_TANH, SILU
from longctx.models.int8_linears import Int8Linear, join_linears, quantize_linears
from tests.helpers.resident import resident_bytes
from tests.helpers.tiny import TINY, make_tiny, random_ids

GROUP = 64
# Whole and broken groups of inputs, whole and broken panels of outputs.
SHAPES = [(640, 256), (64, 33), (96, 64), (70, 31), (1, 1), (576, 193)]


def rows_of(n: int, in_features: int, seed: int = 0) -> torch.Tensor:
    """Random rows whose groups differ in size by powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, in_features, generator=generator)
    sizes = torch.randint(-6, 6, (n, -(-in_features // GROUP)), generator=generator)
    return x * (10.0**sizes).repeat_interleave(GROUP, 1)[:, :in_features]


def coded(x_NI: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The definition of a row's codes and scales [N, I], in float64 but for the fp32 quotient that is rounded."""
    x = x_NI.numpy()
    top = np.empty_like(x)
    for first in range(0, x.shape[1], GROUP):
        top[:, first : first + GROUP] = np.abs(x[:, first : first + GROUP]).max(1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    return np.rint(x * inverse).astype(np.int64), (top / np.float32(127)).astype(np.float64)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_values_against_float64(in_features: int, out_features: int, bias: bool) -> None:
    """Products of the codes to fp32's rounding; the dense product to half a code of each factor.

    Mutants: GROUP of the scales off by one, a code clamped at 126, the offset of unsigned weights left out, one group
    too few.
    """
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(out_features, in_features, generator=generator)
    bias_O = torch.randn(out_features, generator=generator) if bias else None
    x = rows_of(37, in_features)
    weight = quantize_weight(dense)
    got = Int8Linear(weight, bias_O)(x).double()

    codes, scales = coded(x)
    shift = 0 if bias_O is None else bias_O.double()
    w = weight.codes().double() * weight.scale_O.double()[:, None]
    rounded = torch.as_tensor(codes * scales)
    size = rounded.abs() @ w.abs().T + (0 if bias_O is None else bias_O.abs())
    assert ((got - (rounded @ w.T + shift)).abs() <= 1e-6 * size).all()

    half_w, half_x = weight.scale_O.double() / 2, torch.as_tensor(scales) / 2
    bound = x.double().abs() @ torch.ones_like(w).T * half_w + half_x @ (w.abs() + half_w[:, None]).T
    assert ((got - (x.double() @ dense.double().T + shift)).abs() <= 1.001 * bound + 1e-6 * size).all()


def test_weights_at_the_ends_of_their_range() -> None:
    """Sums of 255 times 127 saturate in instructions with 16-bit sums; here they are exact. Mutant: pmaddubsw."""
    for sign in (1.0, -1.0):
        x, w = torch.ones(5, 1920), torch.full((40, 1920), sign)
        got = Int8Linear(quantize_weight(w), None)(x)
        torch.testing.assert_close(got, torch.full((5, 40), sign * 1920), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("in_features", "out_features"), [(640, 96), (70, 33)])
@pytest.mark.parametrize("threads", [1, 2])
def test_no_row_depends_on_the_number_of_rows(in_features: int, out_features: int, threads: int) -> None:
    """Mutants: a group's sum not begun anew; tiles of more rows than are left."""
    linear = Int8Linear(quantize_weight(torch.randn(out_features, in_features)), torch.randn(out_features))
    x = rows_of(513, in_features)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = linear(x)
        for rows in (*range(1, 10), 16, 17, 33, 95, 97, 193, 256, 511):
            for start in (0, 513 - rows):
                assert torch.equal(linear(x[start : start + rows]), whole[start : start + rows]), (rows, start)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (1, 0, 64), (1, 1, 64), (2, 3, 64)])
def test_leading_dimensions_and_strides(shape: tuple[int, ...]) -> None:
    linear, x = Int8Linear(quantize_weight(torch.randn(96, 64)), None), torch.randn(shape)
    out = linear(x)
    assert out.shape == (*shape[:-1], 96)
    wide = torch.randn(*shape[:-1], 128)
    assert torch.equal(linear(wide[..., ::2]), linear(wide[..., ::2].contiguous()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_row_nan_and_no_other(bad: float) -> None:
    """Not a silent number. Mutants: NaN taken for zero, infinity clamped."""
    linear = Int8Linear(quantize_weight(torch.randn(40, 130)), None)
    x = torch.randn(9, 130)
    clean = linear(x)
    for place in (0, 63, 64, 129):
        spoiled = x.clone()
        spoiled[4, place] = bad
        got = linear(spoiled)
        assert got[4].isnan().all()
        assert torch.equal(got[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_zero_tiny_and_huge_rows() -> None:
    """Nothing wraps, nothing is divided by zero; an outlier spoils its own group's resolution and nobody else's."""
    linear = Int8Linear(quantize_weight(torch.randn(40, 192)), None)
    x = torch.randn(6, 192)
    x[0] = 0
    x[1] *= 1e-38
    x[2] *= 1e30
    x[3, 70] = 1e6
    got = linear(x)
    assert (got[:2] == 0).all()
    torch.testing.assert_close(
        got[2], x[2] @ linear.weight_codes.dense().T, rtol=0, atol=0.02 * float(got[2].abs().max())
    )
    lonely = x[3].clone()
    lonely[64:128] = 0
    lonely[70] = 1e6
    assert torch.equal(linear(lonely[None])[0], got[3]), "beside 1e6, values below 1e6 / 254 are code 0"
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(alone, got)


def test_weights_of_zero_rows_and_of_no_numbers() -> None:
    w = torch.randn(70, 100)
    w[3], w[5, 7], w[69, 99] = 0, float("nan"), float("inf")
    weight = quantize_weight(w)
    got = Int8Linear(weight, None)(torch.randn(5, 100))
    bad = torch.zeros(70, dtype=torch.bool)
    bad[[5, 69]] = True
    assert got[:, bad].isnan().all() and got[:, ~bad].isfinite().all() and (got[:, 3] == 0).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (33, 65), (1100, 70), (2048, 64)])
def test_codes_survive_packing_joining_and_pieces(rows: int, columns: int) -> None:
    """Largest magnitudes are code 127, others rounded, whatever the pieces; the plan counts the same bytes."""
    w = torch.randn(rows, columns)
    weight = quantize_weight(w)
    codes = (w / (w.abs().amax(1, keepdim=True) / 127)).round().to(torch.int8)
    assert torch.equal(weight.codes(), codes) and (weight.codes().abs().amax(1) == 127).all()
    assert weight.packed.nbytes + weight.scale_O.nbytes == int8_bytes(rows, columns)
    cut = rows // 3
    for same in (
        quantize_weight(*(part for part in (w[:cut], w[cut:]) if len(part))),
        join([quantize_weight(part) for part in (w[:cut], w[cut:]) if len(part)]),
    ):
        assert torch.equal(same.packed, weight.packed) and torch.equal(same.scale_O, weight.scale_O)


@pytest.mark.parametrize(
    ("code", "act"), [(SILU, nn.functional.silu), (GELU_TANH, lambda x: nn.functional.gelu(x, approximate="tanh"))]
)
def test_gated_rows(code: int, act) -> None:
    """The activation to 1e-6, then the same product; large gates neither overflow nor become NaN."""
    down = Int8Linear(quantize_weight(torch.randn(40, 70)), None)
    both = torch.randn(20, 140) * 3
    both[0, :4] = torch.tensor([1e4, -1e4, 80.0, -90.0])
    hidden = act(both[:, :70]) * both[:, 70:]
    scratch = both.clone()
    got = down.apply_gated(scratch, code)
    torch.testing.assert_close(scratch[:, :70], hidden, rtol=2e-6, atol=1e-6)
    assert torch.equal(got, down(scratch[:, :70]))
    spoiled = both.clone()
    spoiled[3, 5] = float("nan")
    assert down.apply_gated(spoiled, code)[3].isnan().all()


@pytest.mark.parametrize("kind", TINY)
def test_models_compute_what_their_rounded_weights_and_rows_say(kind: str) -> None:
    """Against Hugging Face's own modules on the decoded weights, whose inputs are rounded beforehand; fused or not.

    Rounding noise may tip a code, so the tolerance is a few codes of the last hidden state.
    """
    model, ids = make_tiny(kind), torch.tensor([random_ids(40)])
    plain = make_tiny(kind)
    report = quantize_linears(model)
    assert report.packed == sum(isinstance(module, Int8Linear) for module in model.modules()) > 8
    assert ("expert" in report.reason) == (kind in ("mixtral", "qwen3_moe", "gpt_oss", "llama4_text"))
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear):
            linear = plain.get_submodule(name)
            linear.weight = nn.Parameter(module.weight_codes.dense(), requires_grad=False)
            linear.register_forward_pre_hook(
                lambda _, args: (int8_linears.round_rows(args[0].flatten(0, -2)).view(args[0].shape),)
            )
    with torch.no_grad():
        expected, exact = plain(ids).logits[0], make_tiny(kind)(ids).logits[0]
        for fused in (False, True):
            if fused:
                assert not fuse(model).left
            logits = model(ids).logits[0]
            size = float(expected.abs().max())
            assert float((logits - expected).abs().max()) < 0.02 * size, fused
            assert float((logits - expected).square().mean()) < 0.1 * float((exact - expected).square().mean())


def test_a_copy_stands_alone() -> None:
    linear, x = Int8Linear(quantize_weight(torch.randn(40, 70)), torch.randn(40)), torch.randn(3, 70)
    twin, expected = copy.deepcopy(linear), linear(x)
    linear.weight_codes.packed.zero_()
    assert torch.equal(twin(x), expected)


def test_a_join_keeps_every_output() -> None:
    parts = [Int8Linear(quantize_weight(torch.randn(n, 70)), torch.randn(n)) for n in (33, 7, 64)]
    x = torch.randn(9, 70)
    assert torch.equal(join_linears(parts)(x), torch.cat([part(x) for part in parts], 1))


def test_dense_weights_are_freed_and_a_tied_embedding_kept() -> None:
    model = make_tiny("qwen2")
    gate, embedding = weakref.ref(model.model.layers[0].mlp.gate_proj.weight), model.model.embed_tokens.weight
    before = embedding.clone()
    quantize_linears(model)
    assert gate() is None and model.model.embed_tokens.weight is embedding
    assert torch.equal(embedding, before) and isinstance(model.lm_head, Int8Linear)
    assert quantize_linears(model).packed == 0, "an engine beside another finds nothing left to do"


def test_mapped_weights_leave_memory_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the rest is read: no second copy is ever held. Mutant: pages dropped at the end only."""
    path = tmp_path / "w.safetensors"
    save_file({"weight": torch.randn(8000, 512)}, path)
    with safe_open(path, framework="pt") as tensors:
        weight = tensors.get_tensor("weight")
    most, real = [0], torch.Tensor.amax

    def watched(tensor: torch.Tensor, *args, **kwargs):
        most[0] = max(most[0], resident_bytes(path))
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "amax", watched)
    quantize_weight(weight)
    assert 0 < most[0] < 0.4 * weight.nbytes
    assert resident_bytes(path) < 0.05 * weight.nbytes


def test_other_models_are_refused_in_one_line() -> None:
    model = make_tiny("llama", dtype=torch.bfloat16)
    with pytest.raises(ModelError, match="--weights int8 is for float32 on a CPU, not bfloat16 on cpu: leave it out"):
        quantize_linears(model)
    assert not any(isinstance(module, Int8Linear) for module in model.modules())


@pytest.mark.parametrize(
    ("change", "reason"),
    [(lambda y: y * 1.001, "give wrong values"), (lambda y: y + 1e-6 * (len(y) == 7), "depend on the number of rows")],
)
def test_a_failed_trial_leaves_the_model_unchanged(monkeypatch: pytest.MonkeyPatch, change, reason: str) -> None:
    forward = Int8Linear.forward
    monkeypatch.setattr(Int8Linear, "forward", lambda self, x: change(forward(self, x)))
    model = make_tiny("llama")
    with pytest.raises(ModelError, match=f"does not work on this machine: 64 inputs {reason}; leave it out"):
        quantize_linears(model)
    assert type(model.lm_head) is nn.Linear
