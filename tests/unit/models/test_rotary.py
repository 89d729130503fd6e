"""The swapped rotary modules are Hugging Face's at every regime, and no request sees its mates' regime."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from longctx.errors import ModelError
from longctx.models.rotary import RegimeRotary, swap_rotary
from longctx.models.spec import RopeSpec
from tests.helpers.tiny import TINY, hf_logits, make_tiny, random_ids

ROPES = {"phi3_longrope": RopeSpec("longrope", 64), "llama_dynamic": RopeSpec("dynamic", 64)}


def rope_of(kind: str) -> RopeSpec:
    return ROPES.get(kind, RopeSpec())


COS_AND_SIN = [kind for kind in TINY if kind != "llama4_text"]


def swapped(kind: str, **overrides: Any) -> tuple[PreTrainedModel, RegimeRotary]:
    model = make_tiny(kind, **overrides)
    (rotary,) = swap_rotary(model, rope_of(kind))
    return model, rotary


def layer_types(model: PreTrainedModel) -> list[str | None]:
    return ["full_attention", "sliding_attention"] if model.config.model_type == "gemma3_text" else [None]


def hf_tables(
    kind: str, model: PreTrainedModel, layer_type: str | None, positions: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of a new, unchanged module of Hugging Face's; the largest position decides its regime."""
    rotary = type(make_tiny(kind).model.rotary_emb)(model.config)
    return rotary(torch.empty(0, dtype=dtype), torch.tensor([positions]), *([layer_type] if layer_type else []))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", COS_AND_SIN)
def test_every_model_gets_hugging_faces_tables_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    model, rotary = swapped(kind, dtype=dtype)
    for layer_type in layer_types(model):
        for length in (32, 64, 65, 128, 256, 4096):
            positions = [0, 5, 31, length - 1]
            rotary.regimes = torch.full((4,), rope_of(kind).regime(length))
            ours = rotary(torch.empty(0, dtype=dtype), torch.tensor([positions]), layer_type)
            theirs = hf_tables(kind, model, layer_type, positions, dtype)
            for a, b in zip(ours, theirs, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("kind", COS_AND_SIN)
def test_logits_with_the_swapped_module_are_unchanged(kind: str) -> None:
    ids = random_ids(60)  # below the first regime border, where Hugging Face's module needs no help
    model, _ = swapped(kind, peaky=True)
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([ids])).logits[0], hf_logits(make_tiny(kind, peaky=True), ids))


@pytest.mark.parametrize("kind", ROPES)
def test_long_requests_match_hugging_face_at_their_regime(kind: str) -> None:
    ids = random_ids(40)
    for total in (40, 64, 65, 100, 300):
        model, rotary = swapped(kind, peaky=True)
        rotary.regimes = torch.full((40,), rope_of(kind).regime(total))
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        assert torch.equal(logits, hf_logits(make_tiny(kind, peaky=True), ids, total_tokens=total))


def test_complex_tables_stay_hugging_faces_own_in_fp32() -> None:
    """Llama 4 multiplies with complex numbers: the module stays, but not the frequencies that a cast has rounded."""
    before = make_tiny("llama4_text").model.rotary_emb.inv_freq
    model = make_tiny("llama4_text").to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    assert swap_rotary(model, rope_of("llama4_text")) == []
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "phi3_longrope", "llama_dynamic"])
def test_16_bit_models_keep_fp32_phases(kind: str) -> None:
    """huggingface/transformers#29285, #25681, #29496; huggingface/candle#3520: positions or frequencies in bf16.

    Mutant: `self.register_buffer` for the frequencies, or phases computed in the dtype of x.
    """
    model, rotary = swapped(kind)
    model.to(torch.bfloat16)
    positions = [255, 4097, 15_962, 131_071]
    for layer_type in layer_types(model):
        rotary.regimes = torch.full((4,), rope_of(kind).regime(131_072))
        frequencies = rotary.frequencies(rope_of(kind).regime(131_072), layer_type)
        assert frequencies.dtype == torch.float32
        cos, sin = rotary(torch.empty(0, dtype=torch.bfloat16), torch.tensor([positions]), layer_type)
        # The phase itself is fp32 by definition of these models; its rounding is Hugging Face's own.
        phases = (torch.tensor(positions)[:, None].float() * frequencies).double()
        scale = math.sqrt(1 + math.log(64) / math.log(64)) if kind == "phi3_longrope" else 1.0
        for table, exact in ((cos, phases.cos()), (sin, phases.sin())):
            half = table[0, :, : phases.shape[-1]].double()
            assert (half - scale * exact).abs().max() <= 0.005 * scale


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_bands(factor: float) -> None:
    """ggml-org/llama.cpp#8676, lablup/mlxcel#1355: Llama 3.1 scaling missing, or its factor fixed at 8.

    Mutant: the module built from a config without scaling, or with factor 8.
    """
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    _, rotary = swapped("llama3_scaled", rope_parameters=scaling, max_position_embeddings=131_072)
    plain = 1.0 / 5e5 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    wavelength = 2 * math.pi / plain
    smooth = ((8192 / wavelength - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    expected = plain * (smooth + (1 - smooth) / factor)
    torch.testing.assert_close(rotary.frequencies(0).double(), expected, rtol=2e-6, atol=1e-7)
    _, unscaled = swapped("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    x = torch.empty(0)
    assert torch.equal(rotary(x, torch.tensor([[0]]))[0], unscaled(x, torch.tensor([[0]]))[0])
    assert (rotary(x, torch.tensor([[60_000]]))[0] - unscaled(x, torch.tensor([[60_000]]))[0]).abs().max() > 0.1


def test_dynamic_ntk_grows_its_base_with_the_length_and_never_scales_positions() -> None:
    """vllm-project/vllm#5093, #41236, #41277; ml-explore/mlx-lm#1553: constant, inert, or scaling positions.

    Mutant: any regime answered with the base's frequencies.
    """
    _, rotary = swapped("llama_dynamic")
    exponents = torch.arange(0, 16, 2, dtype=torch.float64) / 16
    for length in (32, 64, 65, 128, 256):
        growth = max(4.0 * length / 64 - 3.0, 1.0)
        expected = 1.0 / (10_000.0 * growth ** (16 / 14)) ** exponents
        regime = rope_of("llama_dynamic").regime(length)
        torch.testing.assert_close(rotary.frequencies(regime).double(), expected, rtol=2e-6, atol=0)
        assert rotary.frequencies(regime)[0] == 1.0  # the fastest dimension turns by whole positions at any length


@pytest.mark.parametrize("kind", ROPES)
def test_requests_of_different_regimes_share_a_batch(kind: str) -> None:
    """huggingface/transformers#25104: keys rotated under one base, queries under another.

    A request is 48 tokens of prefill and then decodes up to 100; its mate stays below the border. Every token has its
    own request's table, whatever the step. Mutant: the first token's regime for the whole batch.
    """
    _, rotary = swapped(kind)
    long, short = rope_of(kind).regime(100), rope_of(kind).regime(60)
    x = torch.empty(0)
    whole_long, whole_short = [], []
    for regime, total, into in ((long, 100, whole_long), (short, 60, whole_short)):
        rotary.regimes = torch.full((total,), regime)
        into.extend(rotary(x, torch.arange(total)[None]))
    for position in range(48, 60):
        rotary.regimes = torch.tensor([short, long, short])
        tables = rotary(x, torch.tensor([[position, position, 3]]))
        for table, of_long, of_short in zip(tables, whole_long, whole_short, strict=True):
            assert torch.equal(table[0, 0], of_short[0, position])
            assert torch.equal(table[0, 1], of_long[0, position])
            assert torch.equal(table[0, 2], of_short[0, 3])
    assert not torch.equal(whole_long[0][0, 48], whole_short[0][0, 48])


def test_gemma3_scales_the_global_layers_only() -> None:
    """ggml-org/llama.cpp#14367, ollama/ollama#13474, Blaizzy/mlx-vlm#1709, lablup/mlxcel#1340.

    Mutant: one layer type's frequencies or scale for both.
    """
    model, rotary = swapped("gemma3_text")
    exponents = torch.arange(0, 16, 2, dtype=torch.float64) / 16
    for layer_type, expected in (
        ("full_attention", 1e6**-exponents / 8.0),
        ("sliding_attention", 1e4**-exponents),
    ):
        torch.testing.assert_close(rotary.frequencies(0, layer_type).double(), expected, rtol=2e-6, atol=0)
        positions = list(range(200, 2001, 200))
        for ours, theirs in zip(
            rotary(torch.empty(0), torch.tensor([positions]), layer_type),
            hf_tables("gemma3_text", model, layer_type, positions, torch.float32),
            strict=True,
        ):
            assert torch.equal(ours, theirs)


def test_tables_do_not_depend_on_the_number_of_rows() -> None:
    _, rotary = swapped("llama")
    whole = rotary(torch.empty(0), torch.arange(3000, 3100)[None])
    for count in (1, 2, 3, 5, 7, 16, 33):
        for table, part in zip(whole, rotary(torch.empty(0), torch.arange(3011, 3011 + count)[None]), strict=True):
            assert torch.equal(table[:, 11 : 11 + count], part)


class _Interleaved(nn.Module):
    """A layout that `RegimeRotary` does not know."""

    def __init__(self, config: Any, rope_type: str = "default") -> None:
        super().__init__()
        self.config, self.rope_type, self.attention_scaling = config, rope_type, 1.0
        self.inv_freq = torch.tensor([1.0, 0.1])

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phases = (position_ids[..., None].float() * self.inv_freq).repeat_interleave(2, dim=-1)
        return phases.cos().to(x.dtype), phases.sin().to(x.dtype)


def test_an_unknown_layout_stays_as_it_is_or_is_refused() -> None:
    model = make_tiny("llama")
    _Interleaved.__name__ = "InterleavedRotaryEmbedding"
    model.model.rotary_emb = _Interleaved(model.config)
    assert swap_rotary(model, RopeSpec()) == []
    assert isinstance(model.model.rotary_emb, _Interleaved)
    model.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(ModelError, match="rope type dynamic at 64 tokens"):
        swap_rotary(model, RopeSpec("dynamic", 64))


def test_a_wrong_spec_is_caught() -> None:
    with pytest.raises(AssertionError, match="spec says static"):
        swap_rotary(make_tiny("llama_dynamic"), RopeSpec())
    with pytest.raises(ModelError, match="longrope at 96 tokens"):
        swap_rotary(make_tiny("phi3_longrope"), RopeSpec("longrope", 32))
