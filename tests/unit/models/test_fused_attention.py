"""Fused attention hands the interface what Hugging Face's module would: heads to rounding, settings exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from longctx.models import fused_attention
from longctx.models.fused import fuse
from longctx.models.fused_attention import ATTENTIONS, FusedAttention, probe
from longctx.models.hook import attach
from longctx.models.linears import pack_linears
from tests.helpers.tiny import TINY, make_tiny, random_ids

KINDS = [kind for kind in TINY if kind not in ("gpt_oss", "olmo2", "llama4_text")]


class Recorder:
    """A plan that notes every call and answers with the queries."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def attend_layer(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> Any:
        self.calls.append((layer, q.clone(), k.clone(), v.clone(), settings))
        return q.transpose(0, 1)


def run(model: Any, ids: list[int], first: int = 0) -> tuple[torch.Tensor, list[tuple[Any, ...]]]:
    plan = Recorder()
    positions = torch.arange(first, first + len(ids))[None]
    with torch.inference_mode():
        output = model(torch.tensor([ids]), position_ids=positions, use_cache=False, longctx_plan=plan)
    return output.logits[0], plan.calls


def fused_tiny(kind: str, **overrides: Any) -> Any:
    model = make_tiny(kind, peaky=True, **overrides)
    pack_linears(model)
    report = fuse(model)
    assert not report.left
    attach(model)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_hook_receives_what_hugging_faces_modules_hand_over(kind: str) -> None:
    """Mutants: keys rotated by the queries' count of heads, the window of layer 0 for all, the scale left out."""
    ids = random_ids(50)
    plain = make_tiny(kind, peaky=True)
    attach(plain)
    _, theirs = run(plain, ids, first=10)
    _, ours = run(fused_tiny(kind), ids, first=10)
    assert len(ours) == len(theirs) == plain.config.num_hidden_layers
    for our, their in zip(ours, theirs, strict=True):
        assert our[0] == their[0] and our[4] == their[4]
        for a, b in zip(our[1:4], their[1:4], strict=True):
            assert a.shape == b.shape
            assert (a - b).abs().max() <= 2e-5 * b.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_depends_on_its_mates(kind: str) -> None:
    """Mutant: packed linears without their padding."""
    model, ids = fused_tiny(kind), random_ids(50)
    if kind in ("mixtral", "qwen3_moe"):
        pytest.skip("the experts stay Hugging Face's, whose products depend on the number of rows")
    whole, whole_calls = run(model, ids)
    for rows in (1, 2, 3, 4, 5, 7, 16, 33):
        for first in (0, 50 - rows):
            # Regimes follow the largest position in Hugging Face's rotary, so keep to one side of its border.
            part, calls = run(model, ids[first : first + rows], first=first)
            assert torch.equal(part, whole[first : first + rows])
            for some, full in zip(calls, whole_calls, strict=True):
                for a, b in zip(some[1:4], full[1:4], strict=True):
                    assert torch.equal(a, b[:, first : first + rows])


def test_settings_of_every_layer_are_its_own() -> None:
    model = fused_tiny("gemma3_text")
    windows = [call[4]["window"] for call in run(model, random_ids(5))[1]]
    assert windows == [32] * 5 + [None]
    assert all(isinstance(layer.self_attn, FusedAttention) for layer in model.model.layers)


def test_biases_are_joined() -> None:
    model = make_tiny("qwen2")
    attention = model.model.layers[0].self_attn
    expected = torch.cat([attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias])
    pack_linears(model)
    fuse(model)
    assert torch.equal(model.model.layers[0].self_attn.qkv_proj.bias, expected)
    assert not any(hasattr(layer.self_attn, "q_proj") for layer in model.model.layers)


def test_a_probe_leaves_the_model_as_it_was() -> None:
    attention = make_tiny("mistral").model.layers[0].self_attn
    tensors, settings = probe(attention, 2)
    assert attention.config._attn_implementation == "eager"
    assert [tuple(t.shape) for t in tensors] == [(1, 4, 2, 32), (1, 2, 2, 32), (1, 2, 2, 32), (1, 2, 64)]
    assert settings["sliding_window"] == 24 and settings["scaling"] == 32**-0.5


def test_a_cache_object_is_refused() -> None:
    model = fused_tiny("llama")
    with pytest.raises(AssertionError, match="without a cache object"):
        model(torch.tensor([[5]]), use_cache=True, longctx_plan=Recorder())


def test_a_class_listed_by_mistake_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """OLMo 2 norms all heads together; were it listed by mistake, the trial would catch it."""
    monkeypatch.setattr("longctx.models.fused.ATTENTIONS", ATTENTIONS | {"Olmo2Attention"})
    model = make_tiny("olmo2")
    pack_linears(model)
    before = [layer.self_attn for layer in model.model.layers]
    report = fuse(model)
    assert "Olmo2Attention" in report.left and "Olmo2Attention" not in report.fused
    assert [layer.self_attn for layer in model.model.layers] == before


def test_rows_that_depend_on_their_number_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fused_attention.norm_and_rotate_heads

    def uneven(x: Any, *rest: Any) -> None:
        real(x, *rest)
        x *= 1.0 + 1e-6 * (len(x) == 3)

    monkeypatch.setattr(fused_attention, "norm_and_rotate_heads", uneven)
    model = make_tiny("llama")
    pack_linears(model)
    assert "depended on their number" in fuse(model).left["LlamaAttention"]


def test_packed_weights_come_back_exactly() -> None:
    dense = nn.Linear(64, 96, bias=False).requires_grad_(False)
    model = make_tiny("llama")
    model.lm_head = dense
    pack_linears(model)
    assert torch.equal(model.lm_head.dense(), dense.weight)
