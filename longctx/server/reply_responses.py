"""Replies of /v1/responses: the response object and the events of its stream."""

from __future__ import annotations

import time
from typing import Any

from longctx.events import ProgressEvent
from longctx.server.answer import Piece
from longctx.server.errors import ApiError
from longctx.server.logprobs import Entry, chat_entry
from longctx.server.reply_parts import Renderer, progress_json
from longctx.server.tool_calls import ToolCall

_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""What OpenAI's enumeration has for our statuses; all else is server_error."""


class ResponsesRenderer(Renderer):
    """OpenAI's responses: a list of output items, messages and function calls in the order in which they came.

    There is one choice. A stream's events are numbered; items open when their first text comes and close when another
    item begins. `failure` and `closing` end a stream with the response as far as it came.
    """

    id_prefix = "resp_"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The message being written: the last of `_output`, its text and logprobs kept in lists until it closes."""
        self._texts: list[str] = []
        self._entries: list[Entry] = []

    def opening(self) -> list[dict[str, Any]]:
        return [
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._brief()),
        ]

    def progress(self, choice: int, event: ProgressEvent) -> dict[str, Any]:
        # No event of OpenAI's means this. The state is sent again, which every client takes, with ours beside it.
        return self._event("response.in_progress", response=self._brief(), prompt_progress=progress_json(choice, event))

    def piece(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        events = []
        for i, part in enumerate(piece.parts):
            if isinstance(part, ToolCall):
                events += [*self._close_message(), *self._call(part)]
            else:
                events += [*self._open_message(), self._delta(part, piece.entries if i == 0 else [])]
        return events

    def ending(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        events = self.piece(choice, piece)
        if not events:
            self._entries += piece.entries
        if not self._output:
            events += self._open_message()
        return [*events, *self._close_message(self._status())]

    def closing(self) -> list[dict[str, Any]]:
        status = self._status()
        return [self._event(f"response.{status}", response=self._final(status))]

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        events = self._close_message("incomplete")
        code = _ERROR_CODES.get(error.status, "server_error")
        problem = {"code": code, "message": error.message, "type": error.type, "param": error.param}
        response = {**self._response("failed"), "error": problem}
        return [*events, self._event("response.failed", response=response)]

    def whole(self) -> dict[str, Any]:
        if not self._output:
            self.ending(0, self.answers[0].whole)  # writes the items that a stream would have sent
        return self._final(self._status())

    # -- items -----------------------------------------------------------------------------------------------------

    def _open_message(self) -> list[dict[str, Any]]:
        if self._open is not None:
            return []
        item = {"id": self._item_id("msg"), "type": "message", "role": "assistant", "status": "in_progress"}
        self._open = {**item, "content": []}
        self._output.append(self._open)
        return [
            self._event("response.output_item.added", output_index=len(self._output) - 1, item=dict(self._open)),
            self._part_event("response.content_part.added", part=_output_text("", [])),
        ]

    def _delta(self, text: str, entries: list[Entry]) -> dict[str, Any]:
        self._texts.append(text)
        self._entries += entries
        return self._part_event("response.output_text.delta", delta=text, logprobs=list(map(chat_entry, entries)))

    def _close_message(self, status: str = "completed") -> list[dict[str, Any]]:
        if self._open is None:
            return []
        text, logprobs = "".join(self._texts), list(map(chat_entry, self._entries))
        part = _output_text(text, logprobs)
        self._open.update(status=status, content=[part])
        events = [
            self._part_event("response.output_text.done", text=text, logprobs=logprobs),
            self._part_event("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=len(self._output) - 1, item=self._open),
        ]
        self._open, self._texts, self._entries = None, [], []
        return events

    def _call(self, call: ToolCall) -> list[dict[str, Any]]:
        index, item_id = len(self._output), self._item_id("fc")
        item = {"id": item_id, "type": "function_call", "call_id": call.id, "name": call.name}
        done = {**item, "arguments": call.arguments, "status": "completed"}
        self._output.append(done)
        where = {"item_id": item_id, "output_index": index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **where, delta=call.arguments),
            self._event("response.function_call_arguments.done", **where, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=index, item=done),
        ]

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self.id.removeprefix(self.id_prefix)}_{len(self._output)}"

    # -- events and the response -----------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _part_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        where = {"item_id": self._open["id"], "output_index": len(self._output) - 1, "content_index": 0}
        return self._event(kind, **where, **fields)

    def _status(self) -> str:
        end = self.answers[0].finish
        return "incomplete" if end is not None and end.reason == "length" else "completed"

    def _brief(self) -> dict[str, Any]:
        """The response without what its sender knows already: instructions and tools may be long."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.options.model,
            "status": "in_progress",
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }

    def _response(self, status: str) -> dict[str, Any]:
        params = self.prepared.works[0].params
        return {
            **self._brief(),
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": params.max_tokens,
            "metadata": {},
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "top_logprobs": self.options.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            **self.options.extra,
            "status": status,
            "output": list(self._output),
            "usage": None,
        }

    def _final(self, status: str) -> dict[str, Any]:
        summary = self.summary()
        response = {**self._response(status), **summary, "usage": _usage(summary["usage"]), "seed": self.seeds[0]}
        if status == "incomplete":
            return {**response, "incomplete_details": {"reason": "max_output_tokens"}}
        return {**response, "completed_at": int(time.time())}


def failed_early(error: ApiError) -> dict[str, Any]:
    """The one event of a stream that failed before there was a response to name."""
    fields = error.body()["error"]
    return {**fields, "type": "error", "sequence_number": 0, **error.body()}


def _output_text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """`usage` by the names of this endpoint. What was computed of a prompt was also written to the cache."""
    details = usage["prompt_tokens_details"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            **details,
            "cache_write_tokens": usage["prompt_tokens"] - details["cached_tokens"],
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
