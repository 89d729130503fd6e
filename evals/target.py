"""Who is asked: the protocol that a model in this process and a server anywhere both follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from longctx import LLM, SamplingParams
from longctx.errors import EngineError
from longctx.events import FinishEvent, ProgressEvent, TokenEvent, TokenLogprobs

TOP_LOGPROBS = 20
"""How many alternatives of each generated token are noted for a control, where the target gives them."""


@dataclass(frozen=True)
class Answer:
    """One greedy answer. `cached_tokens` None: the target does not say.

    `prompt_tokens` is what the target says it read. `prompt_ids`, `token_ids` and `logprobs` are there where the target
    runs in this process.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    finish_reason: str
    ttft_s: float | None
    seconds: float
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


class Target(Protocol):
    """Answers prompts greedily. With `chat`, a prompt is one user message put through the model's template.

    `longest` is the most tokens of prompt and answer together, None if unknown.
    """

    name: str
    chat: bool
    longest: int | None

    def count(self, prompt: str) -> int:
        """The tokens that the model reads of this prompt, its template and BOS included."""
        ...

    def ask(self, prompt: str, max_tokens: int, salt: str | None) -> Answer:
        """Answer `prompt`; requests of different `salt` share no cached block, where the target can be told so."""
        ...

    def config(self) -> Mapping[str, Any]:
        """What a report needs to know about it."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Lengths in tokens at which a wrong setting would show, by name; empty if none is known."""
        ...


class LLMTarget:
    """A model in this process. Owns nothing: the caller closes the `LLM`."""

    def __init__(
        self,
        llm: LLM,
        name: str,
        chat: bool | None = None,
        options: Mapping[str, Any] | None = None,
        on_progress: Callable[[ProgressEvent], None] = lambda event: None,
    ):
        """`chat` None: if the model has a template. `options` are those the `LLM` was made with, for the report."""
        self.llm = llm
        self.name = name
        self.chat = bool(llm.tokenizer and llm.tokenizer.chat_template) if chat is None else chat
        engine: Any = llm.engine
        self.longest: int | None = engine.partition.longest_request
        self.options = dict(options or {})
        self._on_progress = on_progress

    def count(self, prompt: str) -> int:
        return len(self._ids(prompt))

    def ask(self, prompt: str, max_tokens: int, salt: str | None) -> Answer:
        ids = self._ids(prompt)
        params = SamplingParams(max_tokens=max_tokens, logprobs=TOP_LOGPROBS)
        start_s = time.perf_counter()
        first_s: float | None = None
        logprobs: list[TokenLogprobs] = []
        end: FinishEvent | None = None
        for event in self.llm.stream(ids, params, cache_salt=salt):
            if isinstance(event, TokenEvent):
                first_s = first_s or time.perf_counter() - start_s
                if event.logprobs is not None:
                    logprobs.append(event.logprobs)
            elif isinstance(event, ProgressEvent):
                self._on_progress(event)
            else:
                end = event
        assert end is not None
        if end.reason == "error":
            raise EngineError(end.error)
        return Answer(
            text=end.text,
            prompt_tokens=end.usage.prompt_tokens,
            completion_tokens=end.usage.completion_tokens,
            cached_tokens=end.usage.cached_tokens,
            finish_reason=end.reason,
            ttft_s=first_s,
            seconds=time.perf_counter() - start_s,
            prompt_ids=tuple(ids),
            token_ids=end.token_ids,
            logprobs=tuple(logprobs),
        )

    def config(self) -> Mapping[str, Any]:
        engine: Any = self.llm.engine
        spec = engine.loaded.spec
        return {
            "model": self.name,
            "url": None,
            "chat": self.chat,
            "options": self.options,
            "weights": engine.loaded.digest,
            "dtype": spec.dtype,
            "weight_mode": spec.weights,
            "attention_variant": engine.config.variant.key,
            "kv_format": self.llm.kv_format,
        }

    def sizes(self) -> Mapping[str, int]:
        engine: Any = self.llm.engine
        spec = engine.loaded.spec
        sizes = {f"the window of {n}": n for n in sorted({x.window for x in spec.layers if x.window is not None})}
        config = engine.loaded.model.config
        rope = getattr(config, "rope_parameters", None) or {}
        original = spec.rope.original_positions or rope.get("original_max_position_embeddings")
        if original:
            sizes["the length the model was trained at"] = int(original)
        return sizes | {"the model's last position": spec.max_positions}

    def _ids(self, prompt: str) -> list[int]:
        return self.llm.encode([{"role": "user", "content": prompt}] if self.chat else prompt)
