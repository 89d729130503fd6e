"""The allow-list, what is refused even unverified, and the comparison with eager attention."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longctx.errors import ModelError
from longctx.models.allow import ALLOWED, check, text_config, verify_against_eager
from longctx.models.hook import attach
from tests.helpers.tiny import TINY, make_tiny


def test_every_allowed_type_is_in_the_test_matrix() -> None:
    assert {make().model_type for make in TINY.values()} == ALLOWED


@pytest.mark.parametrize("kind", TINY)
def test_allowed_types_pass(kind: str) -> None:
    check(TINY[kind]())


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("jamba", "state would mix requests"),
        ("lfm2", "state would mix requests"),
        ("qwen3_next", "state would mix requests"),
        ("mamba", "state would mix requests"),
        ("recurrent_gemma", "state would mix requests"),
        ("granitemoehybrid", "state would mix requests"),
        ("deepseek_v2", "MLA"),
        ("deepseek_v3", "MLA"),
        ("gemma3n_text", "share keys and values"),
        ("gemma4_text", "share keys and values"),
        ("falcon", "attention interface"),
        ("bloom", "attention interface"),
        ("mpt", "attention interface"),
        ("t5", "no causal language model"),
    ],
)
def test_impossible_types_are_refused_even_unverified(model_type: str, reason: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    for unverified in (False, True):
        with pytest.raises(ModelError, match=reason) as caught:
            check(config, unverified)
        assert repr(model_type) in str(caught.value) and "\n" not in str(caught.value)


def test_unverified_types_need_the_flag() -> None:
    config = CONFIG_MAPPING["phi"]()
    with pytest.raises(ModelError, match="--unverified-model"):
        check(config)
    check(config, unverified=True)


@pytest.mark.parametrize("kind", ["gemma3", "llama4"])
def test_pictures_and_text_models_use_their_text_part(kind: str) -> None:
    config = CONFIG_MAPPING[kind]()
    assert text_config(config).model_type == f"{kind}_text"
    plain = PreTrainedConfig()
    assert text_config(plain) is plain


@pytest.mark.parametrize("error", [0.0, 0.5, float("nan")])
def test_unverified_model_is_compared_with_eager(error: float) -> None:
    model = make_tiny("llama")
    reference = make_tiny("llama")
    attach(model)

    def run_logits(ids: list[int]) -> torch.Tensor:
        return reference(torch.tensor([ids])).logits[0] + error

    if error == 0.0:
        verify_against_eager(model, run_logits)
    else:
        with pytest.raises(ModelError, match="logits differ"):
            verify_against_eager(model, run_logits)
    assert model.config._attn_implementation == "longctx"
