"""The control: the same tokens through Hugging Face in float32, without prefix cache and without this project."""

# Shape legend: T tokens of a chunk, n generated tokens, V vocabulary.
from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from longctx import LLM
from longctx.errors import LongctxError
from longctx.events import TokenLogprobs

CHUNK_TOKENS = 512
TOLERANCE = 1e-2
"""Of a logprob, between two float32 computations of the same tokens. gemma3-270m: 5e-5 at 1K, 3e-4 at 2K; one key too
many in its windows makes 0.2, though every needle is still found."""

OK, ENGINE_ERROR, LOSSY = "ok", "engine error", "lossy"


@dataclass(frozen=True)
class Comparison:
    """How far the engine's logprobs were from the control's, over every token noted, and what that means.

    `same_tokens`: the control would have chosen the same ones. `verdict` is `ok` within the tolerance, else `lossy`
    where the user chose a lossy way to store or compute, and `engine error` where nothing but a fault can explain it.
    """

    max_difference: float
    same_tokens: bool
    verdict: str


class Reference:
    """A second copy of a model, as Hugging Face loads it. Raises `LongctxError` where there are no weights to load.

    With `lossy` a difference is the user's choice (a KV or weight format narrower than float32, an attention variant)
    and no engine error.
    """

    def __init__(self, llm: LLM) -> None:
        engine: Any = llm.engine
        folder = engine.loaded.model.config.name_or_path
        if not folder or engine.config.load.load_format == "dummy":
            raise LongctxError(
                "the control needs weights on disk: leave out --load-format dummy, or use --control none"
            )
        spec = engine.loaded.spec
        formats = {fmt for group in engine.groups for fmt in (group.key.k_format, group.key.v_format)}
        exact = spec.dtype == "float32" and formats == {"fp32"} and engine.config.variant.reach is None
        self.lossy = not exact
        # Hugging Face lets each forward choose such a model's rope by its own length: only one forward is comparable.
        self._at_once = spec.rope.kind != "static"
        config = copy.deepcopy(engine.loaded.model.config)
        # Eager: the one that every model has, and what the others are written after.
        config._attn_implementation = "eager"
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
        self._vocab_limit: int = engine.loaded.vocab_limit
        # Renamed between versions of transformers; the old name warns at each call.
        names = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def compare(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], noted: Sequence[TokenLogprobs], max_tokens: int
    ) -> Comparison:
        """Hold what the engine noted of each generated token beside the control's logprobs of the same tokens.

        `max_tokens` is what the request asked for: a model's rope may depend on it.
        """
        assert len(token_ids) == len(noted), "every generated token needs its logprobs"
        logprobs_nV = self.logprobs(prompt_ids, token_ids, max_tokens)
        worst = 0.0
        for row_V, token, note in zip(logprobs_nV, token_ids, noted, strict=True):
            ids, theirs = [token, *note.top_ids], [note.logprob, *note.top_logprobs]
            difference = (row_V[ids] - torch.tensor(theirs)).abs().max().item()
            worst = max(worst, difference if difference == difference else float("inf"))
        same = logprobs_nV.argmax(-1).tolist() == list(token_ids)
        wrong = LOSSY if self.lossy else ENGINE_ERROR
        return Comparison(worst, same, OK if worst <= TOLERANCE else wrong)

    @torch.inference_mode()
    def logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int], max_tokens: int) -> torch.Tensor:
        """Logprobs [n, V] that precede each of the n generated tokens, given the prompt and those before it."""
        num = len(token_ids)
        ids = [*prompt_ids, *token_ids[:-1]]
        if self._at_once:
            # As long as the request could have become; no row sees those behind it.
            ids += [ids[-1]] * (len(prompt_ids) + max_tokens - len(ids))
            keep = len(ids) - len(prompt_ids) + 1
            logits = self._model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=keep).logits[0, :num]
        else:
            logits = self._in_chunks(torch.tensor(ids), num)
        # Rows of the head that stand for no token take no part in the engine's logprobs either.
        return torch.log_softmax(logits[:, : self._vocab_limit].float(), dim=-1)

    @torch.inference_mode()
    def rows(self, ids: Sequence[int], positions: np.ndarray) -> Iterator[np.ndarray]:
        """Logits [V] fp32 at ascending `positions` of a text, one after the other."""
        if self._at_once:
            keep = torch.as_tensor(positions)
            yield from self._numbers(self._model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=keep))
            return
        cache, start = DynamicCache(config=self._model.config), 0
        for chunk_T in torch.tensor(ids).split(CHUNK_TOKENS):
            mine = positions[(positions >= start) & (positions < start + len(chunk_T))] - start
            known = {self._cache_name: cache}
            # An empty index keeps no row.
            output = self._model(input_ids=chunk_T[None], use_cache=True, logits_to_keep=torch.as_tensor(mine), **known)
            start += len(chunk_T)
            yield from self._numbers(output)

    def _numbers(self, output: Any) -> np.ndarray:
        rows: np.ndarray = output.logits[0, :, : self._vocab_limit].float().numpy()
        return rows

    def _in_chunks(self, ids: torch.Tensor, num: int) -> torch.Tensor:
        cache = DynamicCache(config=self._model.config)
        head, tail = ids[: len(ids) - num], ids[len(ids) - num :]
        for chunk_T, keep in [*((c, 1) for c in head.split(CHUNK_TOKENS) if len(c)), (tail, len(tail))]:
            known = {self._cache_name: cache}
            output = self._model(input_ids=chunk_T[None], use_cache=True, logits_to_keep=keep, **known)
        logits: torch.Tensor = output.logits[0]
        return logits
