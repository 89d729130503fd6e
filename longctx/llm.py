"""The Python API: load a model once, ask what a job needs, run it, watch it, score with it."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np

from longctx.build import Progress, build_beside, build_engine
from longctx.config import EngineConfig
from longctx.engine import Engine
from longctx.errors import EngineError, LongctxError, QueueFullError, RequestError
from longctx.events import Event, FinishEvent, PromptLogprobs, Timings, TokenEvent, TokenLogprobs, Usage
from longctx.forward import OnAttention
from longctx.kv.budget import Plan
from longctx.kv.factors import KeyFactors, KeyStatistics
from longctx.kv.groups import formats_text
from longctx.loop import EngineLoop, Subscription
from longctx.models.tokenizer import encode_chat, encode_prompt
from longctx.params import SamplingParams
from longctx.request import Request, ScoreSheet, as_token_ids

_RETRY_S = 0.05
"""Between two attempts to queue a request when others' requests fill the queue."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages (`[{"role": ..., "content": ...}]`, through the model's own template)."""


@dataclass(frozen=True)
class Output:
    """A finished generation. `error` says why it failed, `finish_reason` is then "error" and the text may end early.

    `logprobs` (one entry per token) and `prompt_logprobs` are there if the params asked for them.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    computed_tokens: int
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class GenerationError(EngineError):
    """Some prompts of a `generate` call failed; `outputs` has all in order, the failed ones with their `error`."""

    def __init__(self, message: str, outputs: Sequence[Output]):
        super().__init__(message)
        self.outputs = list(outputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.outputs)


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
        self._drive(build_engine(EngineConfig.from_options(model, **options), progress))

    def beside(self, **options: Any) -> LLM:
        """Another engine over the same weights, with pools of its own: this one's options but for some of those of the
        cache and the scheduler, for example `kv_format="int8"`. Either waits while the other computes."""
        other = object.__new__(type(self))
        other._drive(build_beside(self.engine, options))
        return other

    def _drive(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = EngineLoop(engine)
        self._finalizer = weakref.finalize(self, self._loop.close)

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer, or None if it has none."""
        return self.engine.loaded.tokenizer

    @property
    def kv_format(self) -> str:
        """How every layer's keys and values are stored: one format, or the rules of a policy where layers differ."""
        return formats_text(self.engine.groups)

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
        before the first is computed. If some fail inside the engine, the others are still finished, and then
        `GenerationError` is raised, which carries every output. If the caller is interrupted, all are cancelled.
        """
        many = _each_prompt(prompts)
        each = [params or SamplingParams()] * len(many) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(each)} sampling params")
        requests = [
            self.engine.make_request(self.encode(p), s, cache_salt=cache_salt) for p, s in zip(many, each, strict=True)
        ]
        outputs = self._run_all(requests)
        failed = [i for i, output in enumerate(outputs) if output.error is not None]
        if failed:
            what = f"{len(failed)} of {len(outputs)} prompts failed, first number {failed[0] + 1}: " * (
                len(outputs) > 1
            )
            raise GenerationError(f"{what}{outputs[failed[0]].error}", outputs)
        return outputs

    def cancel(self, request: Request | str) -> bool:
        """Ask for a request to end, between two layers at the latest. False if it is not alive."""
        return self._loop.cancel(request if isinstance(request, str) else request.id)

    def score(
        self,
        token_ids: Sequence[int],
        *,
        logits: bool = False,
        decode: int = 0,
        on_logits: Callable[[int, np.ndarray], None] | None = None,
    ) -> Score:
        """Logprob of every token given those before it, in bounded memory; with `logits`, every row too.

        The last `decode` tokens are computed one by one, as an answer's are. `on_logits(start, rows)` hears the logits
        [n, vocab] of positions from `start` on as they come, from the engine's thread, and none are kept; a position
        may come again. Nothing is taken from the prefix cache: a cached position has no logits.
        """
        if not 0 <= decode < max(1, len(token_ids)):
            raise RequestError(f"decode={decode} must be at least 0 and leave one of {len(token_ids)} tokens to read")
        failed: list[BaseException] = []

        def hand_over(start: int, rows: np.ndarray) -> None:
            try:
                if on_logits is not None and not failed:
                    on_logits(start, rows)
            except BaseException as error:
                # It is the caller's, not the engine's: the engine goes on, the caller gets it.
                failed.append(error)
                self.cancel(request)

        sheet = ScoreSheet(logits or on_logits is not None, decode, None if on_logits is None else hand_over)
        request = self.engine.make_request(token_ids, SamplingParams(max_tokens=1), score=sheet)
        [output] = self._run_all([request])
        if failed:
            raise failed[0]
        if output.error is not None:
            raise EngineError(output.error)
        if output.finish_reason != "scored":
            raise LongctxError("the request was cancelled before everything was scored")
        logprobs = np.concatenate(sheet.logprobs)[:-1]
        return Score([None, *logprobs.tolist()], np.concatenate(sheet.logits) if sheet.logits else None)

    @contextmanager
    def probe(self, on_attention: OnAttention) -> Iterator[None]:
        """Let `on_attention(layer, positions, out)` see every layer's attention output while the block runs.

        positions [T] int64, out [T, heads, head dim] float32, to be copied and not kept. It is called by the engine's
        thread, for all rows of a step together: run one request at a time.
        """
        self.engine.runner.on_attention = on_attention
        try:
            yield
        finally:
            self.engine.runner.on_attention = None

    def calibrate_kv(self, token_ids: Sequence[int]) -> KeyFactors:
        """Key factors from a text of the kind that will be served: `save` them and give the file as `kv_factors`.

        A lossy format then loses less where a model has channels of keys that are always large. Run it on exact keys
        (`kv_format="auto"`), with no other request beside it.
        """
        runner = self.engine.runner
        usual, statistics = runner.keys, KeyStatistics(runner.keys)
        runner.keys = statistics
        try:
            self.score(token_ids)
        finally:
            runner.keys = usual
        return statistics.factors()

    def close(self) -> None:
        """Stop the engine's thread and keep the step times it learned; open requests are cancelled."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_all(self, requests: Sequence[Request]) -> list[Output]:
        """Run requests to their ends, waiting for places in the queue where there are none."""
        outputs: list[Output] = []
        started: deque[Subscription] = deque()
        waiting = deque(requests)
        try:
            while waiting or started:
                try:
                    while waiting and len(started) < self.engine.config.scheduler.max_queue:
                        started.append(self._loop.submit(waiting[0]))
                        waiting.popleft()
                except QueueFullError:
                    if not started:
                        time.sleep(_RETRY_S)
                if started:
                    outputs.append(_output(started[0]))
                    started.popleft()
        finally:
            for subscription in started:
                self._loop.cancel(subscription.request.id)
        return outputs

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


def _output(subscription: Subscription) -> Output:
    """Wait for a request's end. An engine that breaks fails it like a step that does."""
    request, logprobs = subscription.request, list[TokenLogprobs]()
    try:
        for event in subscription:
            if isinstance(event, TokenEvent) and event.logprobs is not None:
                logprobs.append(event.logprobs)
    except EngineError as error:
        usage, timings = Usage(request.num_prompt_tokens, 0, 0), Timings(0.0, 0.0, 0.0, 0.0, 0.0)
        return Output(request.id, "", (), "error", usage, timings, request.computed_tokens, str(error))
    assert isinstance(event, FinishEvent)
    return Output(
        event.request_id,
        event.text,
        event.token_ids,
        event.reason,
        event.usage,
        event.timings,
        event.computed_tokens,
        (event.error or "the request failed") if event.reason == "error" else None,
        tuple(logprobs) if request.params.logprobs is not None else None,
        event.prompt_logprobs,
    )
