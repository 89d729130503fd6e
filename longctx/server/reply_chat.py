"""Replies of /v1/chat/completions: `chat.completion` objects and their chunks, tool calls included."""

from __future__ import annotations

from typing import Any

from longctx.events import ProgressEvent
from longctx.server.answer import Piece
from longctx.server.logprobs import chat_logprobs, prompt_rows
from longctx.server.reply_parts import Renderer, finish_reason, progress_json
from longctx.server.tool_calls import ToolCall


class ChatRenderer(Renderer):
    """OpenAI's chat completions.

    Nothing is said about a choice before it has said something; its role comes with its first words. Choices appear in
    their order, since clients gather them in a list: the role of one that is late is sent ahead.
    """

    id_prefix = "chatcmpl-"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._num_begun = 0
        self._num_calls = [0] * len(self.answers)

    def progress(self, choice: int, event: ProgressEvent) -> dict[str, Any]:
        return {**self._chunk(), "prompt_progress": progress_json(choice, event)}

    def piece(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        for i, part in enumerate(piece.parts):
            delta = {"content": part} if isinstance(part, str) else self._call_delta(choice, part)
            entries = piece.entries if i == 0 else []
            chunks.append(self._chunk(*self._begin(choice, delta), self._choice(choice, delta, entries)))
        return chunks

    def ending(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        chunks = self.piece(choice, piece)
        delta: dict[str, Any] = {}
        begun = self._begin(choice, delta)
        if delta:
            delta["content"] = ""
        end = {
            **self._choice(choice, delta, piece.entries if not chunks else []),
            "finish_reason": finish_reason(self.answers[choice]),
            "seed": self.seeds[choice],
        }
        last = self._chunk(*begun, end)
        if len(self.ends) == len(self.answers) and not self.options.include_usage:
            last = {**last, **self.summary()}
        return [*chunks, last]

    def closing(self) -> list[dict[str, Any]]:
        return [{**self._chunk(), **self.summary()}] if self.options.include_usage else []

    def whole(self) -> dict[str, Any]:
        whole = {
            **self._head("chat.completion"),
            "choices": [self._whole_choice(i) for i in range(len(self.answers))],
            **self.summary(),
            **self.options.extra,
        }
        if (prompt := self.prompt_text(0)) is not None:
            whole["prompt_logprobs"] = prompt_rows(prompt)
        return whole

    def _whole_choice(self, index: int) -> dict[str, Any]:
        piece = self.answers[index].whole
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message["content"] = piece.text or None
            message["tool_calls"] = [_call_json(call) for call in piece.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": None if self.options.logprobs is None else chat_logprobs(piece.entries),
            "finish_reason": finish_reason(self.answers[index]),
            "seed": self.seeds[index],
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.options.model}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self.options.include_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": list(choices), **usage}

    def _choice(self, index: int, delta: dict[str, Any], entries: list[Any]) -> dict[str, Any]:
        logprobs = chat_logprobs(entries) if self.options.logprobs is not None and entries else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _begin(self, choice: int, delta: dict[str, Any]) -> list[dict[str, Any]]:
        """Put the role into a choice's first delta; gives those of choices before it that have not begun."""
        if choice < self._num_begun:
            return []
        before = [self._choice(i, {"role": "assistant"}, []) for i in range(self._num_begun, choice)]
        self._num_begun = choice + 1
        delta["role"] = "assistant"
        return before

    def _call_delta(self, choice: int, call: ToolCall) -> dict[str, Any]:
        index = self._num_calls[choice]
        self._num_calls[choice] += 1
        return {"tool_calls": [{"index": index, **_call_json(call)}]}


def _call_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
