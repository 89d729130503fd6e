"""One choice's answer as it grows: what of it may be shown, its tokens' logprobs, the calls in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from longctx.events import FinishEvent, TokenEvent
from longctx.server.logprobs import Entry, TokenSpeller
from longctx.server.tool_calls import ToolCall, ToolCallParser


@dataclass(frozen=True)
class Piece:
    """What one event adds: content and calls in their order, and the tokens whose text has begun by now."""

    parts: list[str | ToolCall] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]

    def __bool__(self) -> bool:
        return bool(self.parts)


class Answer:
    """The text, calls and logprobs of one choice.

    A token is held back until its text is out: half characters and possible stop strings come late. A token that begins
    where a stopped answer ends (the end token, or within a stop string) is no part of the answer; usage counts it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, with_logprobs: bool, with_tools: bool):
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._with_tools = with_tools
        self.finish: FinishEvent | None = None
        self.forget()

    def forget(self) -> None:
        """Begin again: the engine runs this choice once more from its start."""
        self._speller = TokenSpeller(self._tokenizer) if self._with_logprobs else None
        self._parser = ToolCallParser() if self._with_tools else None
        self._length = 0
        self._held: list[Entry] = []
        self._pieces: list[Piece] = []

    @property
    def whole(self) -> Piece:
        """Everything so far."""
        parts = [part for piece in self._pieces for part in piece.parts]
        return Piece(parts, [entry for piece in self._pieces for entry in piece.entries])

    def take(self, event: TokenEvent) -> Piece:
        """The next token. The piece is empty, and nothing is to be sent, unless the token completes some text."""
        if self._speller is not None:
            self._held.append(self._speller.take(event.token_id, event.logprobs))
        self._length += len(event.text)
        if self._parser is not None:
            parts = self._parser.add(event.text)
        else:
            parts = [event.text] if event.text else []
        return self._piece(parts, [entry for entry in self._held if entry.offset < self._length] if parts else [])

    def close(self, event: FinishEvent) -> Piece:
        """The end: what may have become a call and did not, and the last tokens, which may have no text."""
        self.finish = event
        stopped = event.reason == "stop"
        entries = [entry for entry in self._held if entry.offset < self._length or not stopped]
        return self._piece(self._parser.finish() if self._parser is not None else [], entries)

    def _piece(self, parts: list[str | ToolCall], entries: list[Entry]) -> Piece:
        self._held = self._held[len(entries) :]
        piece = Piece(parts, entries)
        self._pieces.append(piece)
        return piece
