"""A request whose events are made by hand: what replies are tested with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import numpy as np

from longctx.detokenize import IncrementalDetokenizer
from longctx.events import (
    Event,
    FinishEvent,
    ProgressEvent,
    PromptLogprobs,
    Timings,
    TokenEvent,
    TokenLogprobs,
    Usage,
)
from longctx.params import SamplingParams
from longctx.server.errors import ApiError
from longctx.server.reply import Reply
from longctx.server.ticket import Restarted
from longctx.server.work import Prepared, ReplyOptions, Work
from longctx.stop import StopMatcher
from tests.helpers.tokenizers import byte_level_tokenizer


class FakeRunning:
    """What a reply reads of a `Running`. `items` are (choice, event) pairs, or an `ApiError` to raise there."""

    id = "0123456789abcdef01234567"
    created = 1_700_000_000

    def __init__(
        self,
        endpoint: str,
        items: Iterable[Any],
        *,
        prompts: Sequence[Sequence[int]] = ((5, 6, 7),),
        tokenizer: Any = None,
        params: SamplingParams | None = None,
        **options: Any,
    ):
        reply = ReplyOptions("tiny", **options)
        params = params or SamplingParams(max_tokens=16, logprobs=reply.logprobs)
        arrays = [np.array(prompt, dtype=np.int32) for prompt in prompts for _ in range(reply.n)]
        works = tuple(Work(array, params, choice) for choice, array in enumerate(arrays))
        self.prepared = Prepared(endpoint, works, reply)
        self.seeds = [100 + choice for choice in range(len(works))]
        self.tokenizer = byte_level_tokenizer() if tokenizer is None else tokenizer
        self.items = list(items)
        self.log: list[Any] = []
        """What happened in which order: chunks as the reader got them, ("deliver", choice), "cancel"."""
        self.cancelled = False
        self.finished = False

    async def events(self) -> AsyncIterator[tuple[int, Event | Restarted]]:
        try:
            for item in self.items:
                await asyncio.sleep(0)
                if isinstance(item, ApiError):
                    raise item
                yield item
            self.finished = True
        finally:
            if not self.finished:
                self.cancel()

    def deliver(self, choice: int) -> None:
        self.log.append(("deliver", choice))

    def cancel(self) -> None:
        self.cancelled = True


def chunks_of(running: FakeRunning) -> list[dict[str, Any]]:
    """A whole stream, followed by its failure's chunks if it failed; all of them in `running.log` too."""

    async def read() -> list[dict[str, Any]]:
        reply, got = Reply(running), []
        try:
            async for chunk in reply.chunks():
                running.log.append(chunk)
                got.append(chunk)
        except ApiError as error:
            got += reply.failure(error)
        return got

    return asyncio.run(read())


def whole_of(running: FakeRunning) -> dict[str, Any]:
    return asyncio.run(Reply(running).collect())


def generated(
    ids: Sequence[int],
    *,
    choice: int = 0,
    reason: str = "length",
    stop: Sequence[str] = (),
    cached: int = 0,
    prompt_tokens: int = 3,
    tokenizer: Any = None,
    logprobs: Sequence[TokenLogprobs] | None = None,
    prompt_logprobs: PromptLogprobs | None = None,
) -> list[tuple[int, Event]]:
    """The events of a choice that generates `ids`, as an engine gives them: text complete, stop strings held back."""
    text = IncrementalDetokenizer(tokenizer or byte_level_tokenizer())
    matcher, events, texts, hit = StopMatcher(tuple(stop)), [], [], False
    for index, token_id in enumerate(ids):
        piece, hit = matcher.add(text.add(token_id))
        is_last = hit or index == len(ids) - 1
        if is_last and not hit:
            tail, hit = matcher.add(text.finish())
            piece += tail if hit else tail + matcher.finish()
        if not is_last or reason not in ("cancelled", "error") or hit:
            texts.append(piece)
        events.append((choice, TokenEvent("r", token_id, piece, index, logprobs[index] if logprobs else None)))
        if hit:
            break
    end = FinishEvent(
        "r",
        "stop" if hit else reason,
        "".join(texts),
        tuple(ids[: len(events)]),
        Usage(prompt_tokens, len(events), cached, {"g1": cached}),
        Timings(1.0 + choice, 20.0 + choice, 300.0, 40.0, 60.0),
        prompt_tokens - cached + len(events) - 1,
        "it broke" if reason == "error" else None,
        prompt_logprobs,
    )
    return [*events, (choice, end)]


def said(text: str, **kwargs: Any) -> list[tuple[int, Event]]:
    """The events of a choice that says `text`, token by token."""
    tokenizer = kwargs.get("tokenizer") or byte_level_tokenizer()
    return generated(tokenizer.encode(text, add_special_tokens=False), **kwargs)


def progressed(processed: int, *, choice: int = 0, total: int = 3, stage: str = "prefill") -> tuple[int, ProgressEvent]:
    return choice, ProgressEvent("r", stage, total, 0, processed, 10.0, 5.0, None)
