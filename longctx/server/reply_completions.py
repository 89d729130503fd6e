"""Replies of /v1/completions: `text_completion` objects, whole and in chunks."""

from __future__ import annotations

from typing import Any

from longctx.events import ProgressEvent
from longctx.server.answer import Piece
from longctx.server.logprobs import Entry, completion_logprobs, echoed_logprobs, prompt_rows
from longctx.server.reply_parts import Renderer, finish_reason, progress_json


class CompletionsRenderer(Renderer):
    """OpenAI's completions. A chunk has the same shape as the whole; `echo` repeats the prompt in front."""

    id_prefix = "cmpl-"

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk(self._choice(i, echo)) for i in range(len(self.answers)) if (echo := self._echo(i))]

    def progress(self, choice: int, event: ProgressEvent) -> dict[str, Any]:
        return {**self._chunk(), "prompt_progress": progress_json(choice, event)}

    def piece(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        return [self._chunk(self._choice(choice, piece.text, piece.entries))]

    def ending(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        chunk = self._chunk({**self._choice(choice, piece.text, piece.entries), **self._end(choice)})
        is_last = len(self.ends) == len(self.answers)
        return [{**chunk, **self.summary()} if is_last and not self.options.include_usage else chunk]

    def closing(self) -> list[dict[str, Any]]:
        return [{**self._chunk(), **self.summary()}] if self.options.include_usage else []

    def whole(self) -> dict[str, Any]:
        choices = [self._whole_choice(i) for i in range(len(self.answers))]
        return {**self._head(), "choices": choices, **self.summary()}

    def _whole_choice(self, index: int) -> dict[str, Any]:
        piece = self.answers[index].whole
        choice = {**self._choice(index, self._echo(index) + piece.text, piece.entries), **self._end(index)}
        # A stream has none of these: they are known when the prompt has been read, and complete at the end.
        prompt = self.prompt_text(index)
        if prompt is not None and self.options.echo is not None and choice["logprobs"] is not None:
            choice["logprobs"] = echoed_logprobs(prompt, choice["logprobs"])
        elif prompt is not None:
            choice["prompt_logprobs"] = prompt_rows(prompt)
        return choice

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.options.model}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self.options.include_usage else {}
        return {**self._head(), "choices": list(choices), **usage}

    def _choice(self, index: int, text: str, entries: list[Entry] | None = None) -> dict[str, Any]:
        logprobs = None
        if self.options.logprobs is not None and entries is not None:
            logprobs = completion_logprobs(entries, len(self._echo(index)))
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _end(self, index: int) -> dict[str, Any]:
        return {"finish_reason": finish_reason(self.answers[index]), "seed": self.seeds[index]}

    def _echo(self, choice: int) -> str:
        echo = self.options.echo
        return "" if echo is None else echo[choice // self.options.n]
