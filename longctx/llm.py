"""The Python API: load a model once, ask what a job needs, run it, watch it, score with it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np

from longctx.build import Progress, build_engine
from longctx.config import EngineConfig
from longctx.errors import EngineError, LongctxError, RequestError
from longctx.events import Event, FinishEvent, Timings, Usage
from longctx.kv.budget import Plan
from longctx.loop import EngineLoop, Subscription
from longctx.models.tokenizer import encode_chat, encode_prompt
from longctx.params import SamplingParams
from longctx.request import Request, ScoreSheet, as_token_ids

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages (`[{"role": ..., "content": ...}]`, through the model's own template)."""


@dataclass(frozen=True)
class Output:
    """A finished generation."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    computed_tokens: int


@dataclass(frozen=True)
class Score:
    """Logprobs of a text under the model: `logprobs[i]` of token i given those before; the first is None.

    `logits` [n, vocab] float32 when asked for: row i predicts token i + 1.
    """

    logprobs: list[float | None]
    logits: np.ndarray | None


class LLM:
    """A loaded model with its engine, driven by a thread of its own.

    Options are those of `EngineConfig`'s parts by name, for example `kv_memory="2GiB"`, `max_model_len="64K"`,
    `chunk_tokens=1024`. `progress(stage, done, total)` hears of a download or conversion on first use, in bytes. Use
    as a context manager, or call `close`.
    """

    def __init__(self, model: str, *, progress: Progress | None = None, **options: Any):
        self.engine = build_engine(EngineConfig.from_options(model, **options), progress)
        self._loop = EngineLoop(self.engine)
        self._finalizer = weakref.finalize(self, self._loop.close)

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer, or None if it has none."""
        return self.engine.loaded.tokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, special tokens added by the model's own rule."""
        if isinstance(prompt, str):
            return encode_prompt(self._need_tokenizer(), prompt)
        if isinstance(prompt, Mapping | bytes) or not hasattr(prompt, "__iter__"):
            raise RequestError(f"a prompt is text, token ids or a list of chat messages, got {type(prompt).__name__}")
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], Mapping):
            return encode_chat(self._need_tokenizer(), items)
        return as_token_ids(items)

    def plan(self, prompt: Prompt | int, *, max_tokens: int = 1, concurrency: int = 1) -> Plan:
        """What a prompt (or a number of tokens) needs and how long it takes, by the numbers admission uses."""
        tokens = int(prompt) if isinstance(prompt, int | np.integer) else len(self.encode(prompt))
        return self.engine.plan(tokens + max_tokens, concurrency=concurrency)

    def start(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> Subscription:
        """Queue a prompt and return at once; iterate the subscription for its events."""
        request = self.engine.make_request(self.encode(prompt), params or SamplingParams(), cache_salt=cache_salt)
        return self._loop.submit(request)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> Iterator[Event]:
        """Progress events, then token events, then one finish event. Closing the iterator cancels the request."""
        subscription = self.start(prompt, params, cache_salt=cache_salt)
        try:
            yield from subscription
        finally:
            if not subscription.finished:
                self._loop.cancel(subscription.request.id)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[Output]:
        """Run prompts together and return their outputs in order; an empty list gives none.

        A string, a flat list of token ids and a list of chat messages are each one prompt. All prompts are checked
        before the first is computed; if one fails, or the caller is interrupted, the others are cancelled.
        """
        many = _each_prompt(prompts)
        each = [params or SamplingParams()] * len(many) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(each)} sampling params")
        requests = [
            self.engine.make_request(self.encode(p), s, cache_salt=cache_salt) for p, s in zip(many, each, strict=True)
        ]
        return [_output(event) for event in self._run_all(requests)]

    def cancel(self, request: Request | str) -> bool:
        """Ask for a request to end, between two layers at the latest. False if it is not alive."""
        return self._loop.cancel(request if isinstance(request, str) else request.id)

    def score(self, token_ids: Sequence[int], *, logits: bool = False) -> Score:
        """Logprob of every token given those before it, in bounded memory; with `logits`, every row too.

        Nothing is taken from the prefix cache: a cached position has no logits.
        """
        sheet = ScoreSheet(want_logits=logits)
        request = self.engine.make_request(token_ids, SamplingParams(max_tokens=1), score=sheet)
        [event] = self._run_all([request])
        if event.reason != "scored":
            raise LongctxError("the request was cancelled before everything was scored")
        logprobs = np.concatenate(sheet.logprobs)[:-1]
        return Score([None, *logprobs.tolist()], np.concatenate(sheet.logits) if logits else None)

    def close(self) -> None:
        """Stop the engine's thread and keep the step times it learned; open requests are cancelled."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_all(self, requests: Sequence[Request]) -> list[FinishEvent]:
        """Run requests to their ends, never more at a time than the queue takes from one caller."""
        events: list[FinishEvent] = []
        started: deque[Subscription] = deque()
        try:
            for request in requests:
                if len(started) == self.engine.config.scheduler.max_queue:
                    events.append(_last(started[0]))
                    started.popleft()
                started.append(self._loop.submit(request))
            while started:
                events.append(_last(started[0]))
                started.popleft()
        finally:
            for subscription in started:
                self._loop.cancel(subscription.request.id)
        return events

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; give token ids instead of text")
        return self.tokenizer


def _each_prompt(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """`generate`'s prompts one by one: text, token ids or messages standing alone are one prompt."""
    if isinstance(prompts, str | bytes | Mapping) or not hasattr(prompts, "__iter__"):
        return [prompts]
    items: list[Any] = list(prompts)
    is_one = bool(items) and (isinstance(items[0], Mapping | Number) or getattr(items[0], "ndim", None) == 0)
    return [items] if is_one else items


def _last(subscription: Subscription) -> FinishEvent:
    event = deque(subscription, maxlen=1).pop()
    assert isinstance(event, FinishEvent)
    if event.reason == "error":
        raise EngineError(event.error)
    return event


def _output(event: FinishEvent) -> Output:
    return Output(
        event.request_id,
        event.text,
        event.token_ids,
        event.reason,
        event.usage,
        event.timings,
        event.computed_tokens,
    )
