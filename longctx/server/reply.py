"""From a request's events to what its client gets: the whole object, or the chunks of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from longctx.events import Event, FinishEvent, ProgressEvent, TokenEvent
from longctx.server.errors import ApiError
from longctx.server.reply_chat import ChatRenderer
from longctx.server.reply_completions import CompletionsRenderer
from longctx.server.reply_parts import Renderer, check_end
from longctx.server.reply_responses import ResponsesRenderer
from longctx.server.ticket import Restarted
from longctx.server.work import Prepared, ReplyOptions

RENDERERS: dict[str, type[Renderer]] = {
    "completions": CompletionsRenderer,
    "chat": ChatRenderer,
    "responses": ResponsesRenderer,
}


class Source(Protocol):
    """What a reply needs of a `Running`."""

    @property
    def id(self) -> str: ...
    @property
    def created(self) -> int: ...
    @property
    def prepared(self) -> Prepared: ...
    @property
    def seeds(self) -> Sequence[int]: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None: ...
    def events(self) -> AsyncIterator[tuple[int, Event | Restarted]]: ...
    def deliver(self, choice: int) -> None: ...


class Reply:
    """One request's answer. Read its events once: as `chunks`, after which `whole` may be asked too, or by `collect`.

    Whoever stops reading early, or fails to, cancels the request.
    """

    def __init__(self, running: Source):
        self._running = running
        prepared = running.prepared
        self._options = prepared.options
        self._renderer = RENDERERS[prepared.endpoint](
            prepared, running.id, running.created, running.seeds, running.tokenizer
        )
        self._delivered: set[int] = set()

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """What a stream sends, in order; raises `ApiError` when the request fails, whose chunks `failure` has.

        Progress comes first if it was asked for. No chunk is sent for a token that completes no text.
        """
        renderer = self._renderer
        for chunk in renderer.opening():
            yield chunk
        if self._options.return_progress:
            for choice in range(0, len(renderer.answers), self._options.n):
                yield renderer.progress(choice, self._at_first(choice))
        async for choice, event in self._running.events():
            for chunk in self._chunks_of(choice, event):
                yield chunk
        for chunk in renderer.closing():
            yield chunk

    async def collect(self) -> dict[str, Any]:
        """The whole response object, once every choice has ended. Raises `ApiError`."""
        async for choice, event in self._running.events():
            answer = self._renderer.answers[choice]
            if isinstance(event, TokenEvent):
                answer.take(event)
            elif isinstance(event, FinishEvent):
                answer.close(event)
                check_end(event)
            elif isinstance(event, Restarted):
                answer.forget()
        if self._renderer.is_heavy:
            return await asyncio.to_thread(self._renderer.whole)
        return self._renderer.whole()

    def whole(self) -> dict[str, Any]:
        """The whole response object, after `chunks` has ended."""
        return self._renderer.whole()

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        """What a stream sends after `chunks` has raised."""
        return self._renderer.failure(error)

    def _chunks_of(self, choice: int, event: Event | Restarted) -> list[dict[str, Any]]:
        renderer = self._renderer
        answer = renderer.answers[choice]
        if isinstance(event, ProgressEvent):
            return [renderer.progress(choice, event)] if self._options.return_progress else []
        if isinstance(event, Restarted):
            if choice in self._delivered:
                raise ApiError.from_code("engine_error", "the engine died while this answer was being sent")
            answer.forget()
            return []
        if isinstance(event, TokenEvent):
            piece = answer.take(event)
            if piece:
                self._deliver(choice)
            return renderer.piece(choice, piece) if piece else []
        piece = answer.close(event)
        check_end(event)
        return renderer.ending(choice, piece)

    def _deliver(self, choice: int) -> None:
        # Said before the chunk leaves: what may have been read must not be generated again.
        self._delivered.add(choice)
        self._running.deliver(choice)

    def _at_first(self, choice: int) -> ProgressEvent:
        total = len(self._running.prepared.works[choice].token_ids)
        return ProgressEvent(self._running.id, "queued", total, 0, 0, 0.0, None)


def tokenizing(endpoint: str, model: str, id: str, created: int) -> dict[str, Any]:
    """The first chunk of a stream whose prompt is still being read; not for responses, which first must be created."""
    renderer = RENDERERS[endpoint](Prepared(endpoint, (), ReplyOptions(model)), id, created, (), None)
    return renderer.progress(0, ProgressEvent(id, "tokenizing", 0, 0, 0, 0.0, None))
