"""What replies of every style share: their state, usage by tier, timings, progress, why they ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from longctx.events import FinishEvent, ProgressEvent
from longctx.server.answer import Answer, Piece
from longctx.server.errors import ApiError
from longctx.server.logprobs import PromptText
from longctx.server.work import Prepared

MOST_AT_ONCE = 512
"""Tokens whose logprobs the event loop turns into JSON values by itself: some milliseconds."""

TIERS = ("g1", "g2", "g3", "g4")


def usage_json(ends: Sequence[FinishEvent], n: int) -> dict[str, Any]:
    """`usage` over all choices, each prompt counted once; choice i belongs to prompt i // n.

    A prompt's cached tokens are those of the choice that found fewest: the others also found what that one computed.
    """
    prompts = [min(ends[i : i + n], key=lambda end: end.usage.cached_tokens).usage for i in range(0, len(ends), n)]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(end.usage.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in prompts),
            "by_tier": {tier: sum(usage.by_tier.get(tier, 0) for usage in prompts) for tier in TIERS},
        },
    }


def timings_json(ends: Sequence[FinishEvent]) -> dict[str, float]:
    """`timings` of the whole reply: until its first start and first token; prefill at the best choice's rate, decode
    at the sum of them all."""
    timings = [end.timings for end in ends]
    return {
        "queue_ms": round(min(t.queue_ms for t in timings), 3),
        "ttft_ms": round(min(t.ttft_ms for t in timings), 3),
        "prefill_tokens_per_s": round(max(t.prefill_tokens_per_s for t in timings), 3),
        "decode_tokens_per_s": round(sum(t.decode_tokens_per_s for t in timings), 3),
    }


def progress_json(choice: int, event: ProgressEvent) -> dict[str, Any]:
    """`prompt_progress`, in llama.cpp's shape and more."""
    return {
        "total": event.total,
        "cache": event.cached,
        "processed": event.processed,
        "time_ms": round(event.time_ms, 3),
        "eta_ms": None if event.eta_ms is None else round(event.eta_ms, 3),
        "stage": event.stage,
        "queue_position": event.queue_position,
        "index": choice,
    }


def finish_reason(answer: Answer) -> str:
    """Why a choice ended, in OpenAI's words."""
    assert answer.finish is not None
    return "tool_calls" if answer.finish.reason == "stop" and answer.whole.calls else answer.finish.reason


def check_end(end: FinishEvent) -> None:
    """Raise the `ApiError` of a request that ended without its answer."""
    if end.reason == "cancelled":
        raise ApiError(499, "the request was cancelled", type="cancelled", code="cancelled")
    if end.reason == "error":
        raise ApiError.from_code("engine_error", end.error or "the engine failed")


class Renderer(ABC):
    """Turns the events of one HTTP request into the objects of its endpoint, whole or as a stream's chunks.

    Pure: it is told of everything and keeps no time. The owner passes each event of a choice to `answers[choice]` first
    and shows the piece that comes of it. `whole` and `closing` need every answer's end.
    """

    id_prefix: ClassVar[str]

    def __init__(
        self,
        prepared: Prepared,
        id: str,
        created: int,
        seeds: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None,
    ):
        self.prepared = prepared
        self.options = prepared.options
        self.id = self.id_prefix + id
        self.created = created
        self.seeds = seeds
        self.tokenizer = tokenizer
        self.answers = [
            Answer(tokenizer, with_logprobs=self.options.logprobs is not None, with_tools=bool(self.options.tools))
            for _ in prepared.works
        ]

    @property
    def ends(self) -> list[FinishEvent]:
        """How the choices ended that did."""
        return [answer.finish for answer in self.answers if answer.finish is not None]

    @property
    def is_heavy(self) -> bool:
        """Whether `whole` takes too long for the event loop."""
        if any(end.prompt_logprobs is not None for end in self.ends):
            return True
        tokens = sum(end.usage.completion_tokens for end in self.ends)
        return self.options.logprobs is not None and tokens > MOST_AT_ONCE

    def opening(self) -> list[dict[str, Any]]:
        """What a stream sends before anything has happened."""
        return []

    @abstractmethod
    def progress(self, choice: int, event: ProgressEvent) -> dict[str, Any]:
        """The chunk with `prompt_progress`."""

    @abstractmethod
    def piece(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of a piece that is not empty."""

    @abstractmethod
    def ending(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        """The last chunks of one choice; `piece` may be empty."""

    @abstractmethod
    def closing(self) -> list[dict[str, Any]]:
        """What a stream sends when every choice has ended."""

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        """What a stream sends instead of the rest."""
        return [error.body()]

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The whole response object."""

    def summary(self) -> dict[str, Any]:
        """What the reply says about itself, once all choices ended."""
        usage = usage_json(self.ends, self.options.n)
        return {"usage": usage, "timings": timings_json(self.ends), "warnings": list(self.options.warnings)}

    def prompt_text(self, choice: int) -> PromptText | None:
        """The choice's prompt with its logprobs, if it was asked for them."""
        end = self.answers[choice].finish
        if end is None or end.prompt_logprobs is None:
            return None
        echo = self.options.echo
        text = "" if echo is None else echo[choice // self.options.n]
        return PromptText(self.tokenizer, self.prepared.works[choice].token_ids, text, end.prompt_logprobs)
