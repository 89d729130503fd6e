"""The built-in models, pulled and converted by set-up: their logits and their tokens are Hugging Face's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from longctx.build import assemble
from longctx.config import EngineConfig
from longctx.models.load import load_model
from longctx.params import SamplingParams
from longctx.rates import rates_for
from longctx.request import ScoreSheet
from tests.helpers.engine import LogitTap, run_all
from tests.helpers.tiny import float64

PROMPT_TOKENS, NEW_TOKENS = 2048, 64
PROMPT_TOLERANCE = 1e-3
DECODE_TOLERANCE = 1e-4  # of the largest logit: each decoded token adds its own rounding
SLICE = 64

TEXT = (
    "The harbour of the old town was built when ships still carried grain and salt along the coast. In winter the "
    "water froze as far as the lighthouse, and the keeper walked across the ice to light the lamp. {i} boats were "
    "counted on the morning of day {i}, and the clerk wrote the number into the book with a careful hand. "
)


def prompt_of(tokenizer) -> list[int]:
    ids = tokenizer("".join(TEXT.format(i=i) for i in range(60))).input_ids
    return ids[:PROMPT_TOKENS]


@torch.no_grad()
def hf_logprobs_and_logits(model: PreTrainedModel, ids: list[int], first: int) -> tuple[np.ndarray, torch.Tensor]:
    """Hugging Face in float64: logprob of every next token, and the logits from position `first` on.

    The logprobs come from a head in float32, whose own rounding is a hundredth of what they may differ by.
    """
    head_VD = model.lm_head.weight.detach().clone()
    with float64(model):
        hidden = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        logits = model.lm_head(hidden[first:])
    logprobs = []
    for start in range(0, len(ids) - 1, SLICE):
        end = min(start + SLICE, len(ids) - 1)
        scores = torch.nn.functional.linear(hidden[start:end].float(), head_VD).log_softmax(-1)
        logprobs.append(scores.gather(-1, torch.tensor(ids[start + 1 : end + 1])[:, None])[:, 0].numpy())
    return np.concatenate(logprobs), logits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3-270m", "smollm2-135m"])
def test_a_built_in_model_is_exact(name: str) -> None:
    """A 2,048-token prompt and 64 greedy tokens: logprobs at every position, logits at every step, the same tokens."""
    config = EngineConfig.from_options(name, max_running=2)
    loaded = load_model(name)
    engine = assemble(config, loaded, rates_for(loaded.spec), kv_tokens=8192)
    ids = prompt_of(loaded.tokenizer)
    assert len(ids) == PROMPT_TOKENS
    last: list[np.ndarray] = []
    sheet = ScoreSheet(want_logits=True, on_logits=lambda _, rows: last.append(rows[-1].copy()))
    engine.submit(engine.make_request(ids, SamplingParams(max_tokens=1), score=sheet))
    run_all(engine)
    tap = LogitTap(engine)
    request = engine.add(ids, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    run_all(engine)
    assert request.cached_tokens == PROMPT_TOKENS - 1
    assert np.array_equal(last[-1], tap.of(request)[0].numpy()), "from the cache as without it, to the bit"

    reference = load_model(name).model
    reference.config._attn_implementation = "eager"
    logprobs, logits = hf_logprobs_and_logits(reference, request.token_ids[:-1], PROMPT_TOKENS - 1)
    ours = np.concatenate(sheet.logprobs)[:-1]
    assert np.abs(ours - logprobs[: PROMPT_TOKENS - 1]).max() <= PROMPT_TOLERANCE
    difference = (tap.of(request) - logits).abs()
    assert difference[0].max() <= PROMPT_TOLERANCE
    assert difference.max() <= DECODE_TOLERANCE * logits.abs().max()
    assert logits.argmax(-1).tolist() == request.token_ids[PROMPT_TOKENS:].tolist()
