"""A model without weights: its modules and real buffers, its parameters on the meta device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from longctx.errors import ModelError


def empty_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Hugging Face's own class for `config`, in eval mode. Seconds and megabytes, whatever the model's size.

    Buffers are real, because those that no checkpoint holds (rotary frequencies, in float32 whatever `dtype` is, and
    embedding scales) are computed when a module is made. A tied head shares the embedding's parameter.
    """
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)  # it writes its dtype there
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"the {config.model_type} config does not describe a model that can be built: {reason}"
        ) from error
    model.tie_weights()
    return model.eval().requires_grad_(False)


def embedding_and_head(model: PreTrainedModel) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """The input embedding's weight and the LM head's; the same object when they are tied."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"models of type {model.config.model_type!r} have no LM head that can be read")
    return embedding.weight, head.weight
