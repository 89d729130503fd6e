"""Logprobs as OpenAI's clients read them: the chat's style, the completions' style, and those of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from transformers import PreTrainedTokenizerBase

from longctx.detokenize import IncrementalDetokenizer
from longctx.events import PromptLogprobs, TokenLogprobs

LEAST = -9999.0
"""What OpenAI writes for a logprob too low to name; JSON has no infinity."""


@dataclass(frozen=True)
class Spelled:
    """A token as a reader sees it. `raw` are its bytes, not always whole characters."""

    token_id: int
    raw: bytes
    logprob: float

    def text(self, prefix: str = "") -> str:
        """Its text; for half a character `prefix` and the escaped bytes, so that different tokens read differently."""
        try:
            return self.raw.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in self.raw)


@dataclass(frozen=True)
class Entry:
    """One token of an answer or a prompt: where its text begins, and the alternatives in its place, best first."""

    token: Spelled
    tops: tuple[Spelled, ...]
    offset: int


class TokenSpeller:
    """Follows one text token by token and writes each as an `Entry`.

    Offsets are in characters of the text that the same tokens make (`IncrementalDetokenizer`). Without a tokenizer a
    token reads as its number.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, offset: int = 0, skip_special: bool = True):
        self._text = None if tokenizer is None else IncrementalDetokenizer(tokenizer, skip_special)
        self._offset = offset

    def take(self, token_id: int, logprobs: TokenLogprobs | None) -> Entry:
        """The next token. Logprobs are missing only where a token has none: a prompt's first."""
        entry = self.peek(token_id, logprobs)
        if self._text is not None:
            self._offset += len(self._text.add(token_id))
        return entry

    def peek(self, token_id: int, logprobs: TokenLogprobs | None) -> Entry:
        """The next token, which is not taken."""
        token = self._spell(token_id, logprobs.logprob if logprobs is not None else 0.0)
        tops = () if logprobs is None else map(self._spell, logprobs.top_ids, logprobs.top_logprobs)
        return Entry(token, tuple(tops), self._offset)

    def _spell(self, token_id: int, logprob: float) -> Spelled:
        raw = f"token_id:{token_id}".encode() if self._text is None else self._text.spell(token_id)
        return Spelled(token_id, raw, max(logprob, LEAST))


# -- chat ------------------------------------------------------------------------------------------------------------


def chat_logprobs(entries: Sequence[Entry]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion, whole or of one chunk."""
    return {"content": [chat_entry(entry) for entry in entries], "refusal": None}


def chat_entry(entry: Entry) -> dict[str, Any]:
    """One token with its bytes and alternatives; the answers of /v1/responses have the same."""
    return {**_with_bytes(entry.token), "top_logprobs": [_with_bytes(top) for top in entry.tops]}


def _with_bytes(token: Spelled) -> dict[str, Any]:
    return {"token": token.text(), "bytes": list(token.raw), "logprob": token.logprob}


# -- completions -----------------------------------------------------------------------------------------------------


def completion_logprobs(entries: Sequence[Entry], offset: int = 0) -> dict[str, Any]:
    """`choices[].logprobs` of a completion, whole or of one chunk; the answer begins `offset` characters in."""
    return {
        "tokens": [_legacy_text(entry.token) for entry in entries],
        "token_logprobs": [entry.token.logprob for entry in entries],
        "top_logprobs": [_by_text((*entry.tops, entry.token)) for entry in entries],
        "text_offset": [offset + entry.offset for entry in entries],
    }


def _legacy_text(token: Spelled) -> str:
    return token.text("bytes:")


def _by_text(tokens: Sequence[Spelled]) -> dict[str, float]:
    """Logprobs by text; of two tokens that read the same the more likely one's."""
    best: dict[str, float] = {}
    for token in tokens:
        text = _legacy_text(token)
        best[text] = max(token.logprob, best.get(text, LEAST))
    return best


# -- of a prompt -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PromptText:
    """A prompt's tokens with their logprobs and the text that an answer repeats.

    A BOS that the tokenizer added is in the tokens and not in the text; every other special token counts with its name.
    """

    tokenizer: PreTrainedTokenizerBase | None
    token_ids: np.ndarray
    text: str
    logprobs: PromptLogprobs

    @property
    def num_added(self) -> int:
        """Tokens at the front that are not in the text."""
        tokenizer = self.tokenizer
        if tokenizer is None or tokenizer.bos_token_id is None or not len(self.token_ids):
            return 0
        is_added = self.token_ids[0] == tokenizer.bos_token_id and not self.text.startswith(str(tokenizer.bos_token))
        return int(is_added)

    def entries(self) -> Iterator[Entry]:
        """Every token without its logprobs, microseconds for each."""
        ids = self.token_ids.tolist()
        for token_id in ids[: self.num_added]:
            yield TokenSpeller(self.tokenizer).peek(token_id, None)
        speller = TokenSpeller(self.tokenizer, skip_special=False)
        for token_id in ids[self.num_added :]:
            yield speller.take(token_id, None)


class PromptRows(Sequence[Any]):
    """A JSON array with an entry per prompt token, made when it is read: all at once would take gigabytes.

    `json_pieces` writes it slice by slice. The first entry is None: a prompt's first token has no logprob. The entries
    `then` follow.
    """

    def __init__(self, prompt: PromptText, render: Callable[[Entry], dict[str, Any]], then: Sequence[Any] = ()):
        self._prompt, self._render, self._then = prompt, render, then
        self._num_added = prompt.num_added
        self._first = TokenSpeller(prompt.tokenizer, skip_special=False)
        self._later = TokenSpeller(prompt.tokenizer, skip_special=False)

    def __len__(self) -> int:
        return len(self._prompt.token_ids) + len(self._then)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any] | None]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        if index == 0:
            return None
        ids, speller = self._prompt.token_ids, self._first
        if index >= len(ids):
            return self._then[index - len(ids)]
        if index > self._num_added:
            speller = self._later
            speller.take(int(ids[index - 1]), None)  # a token may read differently behind its predecessor
        return self._render(speller.peek(int(ids[index]), self._prompt.logprobs[index]))


def echoed_logprobs(prompt: PromptText, then: dict[str, Any]) -> dict[str, Any]:
    """The completions' four lists for a prompt that the answer repeats, followed by those of the answer.

    Takes too long for the event loop.
    """
    tokens, offsets = [], []
    for entry in prompt.entries():
        tokens.append(_legacy_text(entry.token))
        offsets.append(min(entry.offset, len(prompt.text)))
    return {
        "tokens": tokens + then["tokens"],
        "token_logprobs": [None, *np.maximum(prompt.logprobs.logprobs, LEAST).tolist(), *then["token_logprobs"]],
        "top_logprobs": PromptRows(prompt, lambda entry: _by_text((*entry.tops, entry.token)), then["top_logprobs"]),
        "text_offset": offsets + then["text_offset"],
    }


def prompt_rows(prompt: PromptText) -> PromptRows:
    """`prompt_logprobs` of a choice, as vLLM has them: an object of the token and its alternatives by their ids."""
    return PromptRows(prompt, _by_id)


def _by_id(entry: Entry) -> dict[str, Any]:
    ranked: dict[int, tuple[Spelled, int | None]] = {entry.token.token_id: (entry.token, None)}
    ranked.update({top.token_id: (top, rank) for rank, top in enumerate(entry.tops, 1)})
    return {
        str(token_id): {"logprob": token.logprob, "rank": rank, "decoded_token": token.text()}
        for token_id, (token, rank) in ranked.items()
    }
