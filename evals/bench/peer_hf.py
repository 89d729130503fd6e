"""Hugging Face transformers as users run it: an unmodified model, SDPA, its own cache, greedy."""

# Shape legend: T tokens of a chunk.
from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from longctx.errors import LongctxError

CHUNK_TOKENS = 512


@dataclass
class Prefilled:
    """A prompt in Hugging Face's cache: seconds to its first token, and that token."""

    cache: DynamicCache
    token: int
    ttft_s: float


class HFPeer:
    """A second copy of an engine's model, from the same folder, with nothing of this project in it.

    The loop does what `generate(prefill_chunk_size=512)` does and leaves out its bookkeeping, in the peer's favour.
    """

    def __init__(self, engine: Any) -> None:
        folder = engine.loaded.model.config.name_or_path
        if not folder or engine.config.load.load_format == "dummy":
            raise LongctxError("--against hf needs weights on disk: leave out --load-format dummy")
        self._model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=_own_config(engine.loaded.model.config),
            dtype=getattr(torch, engine.loaded.spec.dtype),
            attn_implementation="sdpa",
            local_files_only=True,
        ).eval()
        # Renamed between versions of transformers; the old name warns at each call.
        names = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> Prefilled:
        """Read a prompt in chunks of 512 tokens."""
        start = time.perf_counter()
        cache = DynamicCache(config=self._model.config)
        for chunk_T in torch.tensor(ids).split(CHUNK_TOKENS):
            token = self._next(chunk_T, cache)
        return Prefilled(cache, token, time.perf_counter() - start)

    @torch.inference_mode()
    def decode(self, prompt: Prefilled, num_tokens: int) -> tuple[list[float], list[int]]:
        """Seconds of each of `num_tokens` steps after the first token, and their tokens; `prompt` stays as it is."""
        cache, token = copy.deepcopy(prompt.cache), prompt.token
        seconds, tokens = [], []
        for _ in range(num_tokens):
            start = time.perf_counter()
            token = self._next(torch.tensor([token]), cache)
            seconds.append(time.perf_counter() - start)
            tokens.append(token)
        return seconds, tokens

    def _next(self, ids_T: torch.Tensor, cache: DynamicCache) -> int:
        known = {self._cache_name: cache}
        output = self._model(input_ids=ids_T[None], use_cache=True, logits_to_keep=1, **known)
        return int(output.logits[0, -1].argmax())


def _own_config(config: Any) -> Any:
    """A copy of a hooked model's config without the hook."""
    own = copy.deepcopy(config)
    own._attn_implementation = "sdpa"
    return own
