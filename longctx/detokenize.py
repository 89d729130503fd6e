"""Turns token ids into text one by one, never showing half a character."""

from __future__ import annotations

import codecs
import functools
import json
import re

from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class IncrementalDetokenizer:
    """The text of one request, token by token.

    Promises: the pieces joined equal `tokenizer.decode(all_ids, clean_up_tokenization_spaces=False)`, and no piece ends
    inside a character. Two kinds of token are told apart. A **byte token** (every token of a byte-level BPE, `<0xE4>`
    of a SentencePiece vocabulary with byte fallback) adds raw bytes to a UTF-8 decoder, which keeps an incomplete
    character until its last byte, and replaces bytes once it is certain that they are none. A **text token** is decoded
    behind its predecessor, which is all the context that decoders look at. So a token costs the same wherever it
    stands, and nothing is decoded twice.

    One exception to the equality, on purpose: where a run of byte fallback tokens is broken somewhere, `tokenizers`
    replaces every byte of the run, even those of characters that were complete and may have been shown long ago. Here
    complete characters stay, and each broken sequence becomes one U+FFFD.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._previous: int | None = None

    def add(self, token_id: int) -> str:
        """Takes the next token; gives the text that is complete now, possibly none."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None or (self._skip_special_tokens and self._is_special(token_id)):
            return ""  # a decoder leaves both out before it looks at the neighbours
        assert isinstance(token, str)
        raw = self._bytes_of(token_id, token)
        if raw is None:
            text = self._utf8.decode(b"", final=True) + self._text_of(token_id)
            self._utf8.reset()
        else:
            text = self._utf8.decode(raw)
        self._previous = token_id
        return text

    def spell(self, token_id: int) -> bytes:
        """The bytes that a token would add behind those taken so far, a special token those of its name; takes nothing.

        Not always whole characters. Empty for an id that the tokenizer does not know.
        """
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        assert isinstance(token, str)
        raw = self._bytes_of(token_id, token)
        return self._text_of(token_id).encode() if raw is None else raw

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _bytes_of(self, token_id: int, token: str) -> bytes | None:
        """The bytes that a byte token stands for; None for a text token."""
        if self._alphabet is not None:
            try:
                return bytes(self._alphabet[char] for char in token)
            except KeyError:  # an added token such as <|im_end|> stands for its own text
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token)
        if match is None or self._decode([token_id]) == token:
            return None
        value = int(match[1], 16)
        # A first token of ASCII is a whole character, and a decoder that strips the first space strips this one too.
        return None if self._previous is None and value < 0x80 else bytes([value])

    def _text_of(self, token_id: int) -> str:
        """What a text token adds behind its predecessor: a first token may lose the space in front of it."""
        if self._previous is None:
            return self._decode([token_id])
        return self._decode([self._previous, token_id])[len(self._decode([self._previous])) :]

    def _is_special(self, token_id: int) -> bool:
        return self._decode([token_id], skip=True) == "" != self._decode([token_id])

    def _decode(self, ids: list[int], skip: bool = False) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    parts = decoder.get("decoders", [decoder])
    return {part["type"] for part in parts} - {"Fuse"} == {"ByteLevel"}


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The printable characters that byte-level BPE writes for the 256 bytes (Radford et al. 2019), back to bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
