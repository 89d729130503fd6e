"""The prompt of a job, from an option, a file or standard input: read whole, never altered, refused in one line."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path

from longctx.errors import LongctxError, RequestError
from longctx.units import format_bytes

MAX_PROMPT_BYTES = 2**30
"""No model reads as much; a larger file is the wrong one, and would fill the memory before its tokens are counted."""


def read_prompt(text: str | None, path: str | None) -> str:
    """The text of `--prompt` or of the file at `--prompt-file`, of which exactly one must be given; "-" is stdin.

    Line ends stay as they are; a UTF-8 byte order mark is dropped. Raises `LongctxError` naming the option.
    """
    if (text is None) == (path is None):
        have = "both" if text is not None else "neither"
        raise LongctxError(f"give either --prompt TEXT or --prompt-file FILE ('-' reads standard input), got {have}")
    if path is None:
        assert text is not None
        prompt, where = checked_text(text, "--prompt"), "--prompt"
    else:
        where = "standard input" if path == "-" else f"--prompt-file {path}"
        prompt = _decode(_read(path, where), where)
    if not prompt:
        raise RequestError(f"{where} is empty: give at least one character")
    return prompt


def checked_text(text: str, where: str) -> str:
    """A command-line argument as text; bytes that are not UTF-8 arrive as lone surrogates and are refused."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LongctxError(f"{where} is not valid UTF-8 at character {error.start}") from error
    return text


def _read(path: str, where: str) -> bytes:
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with Path(path).expanduser().open("rb") as file:
                data = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise LongctxError(f"{where} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_PROMPT_BYTES:
        raise LongctxError(f"{where} is larger than {format_bytes(MAX_PROMPT_BYTES)}: no model reads that much")
    return data


def _decode(data: bytes, where: str) -> str:
    remedy = "give a text file in UTF-8, converted with iconv if need be"
    data = data.removeprefix(codecs.BOM_UTF8)
    # UTF-16 without a mark is valid UTF-8 with a NUL in every second byte.
    if (nul := data.find(0)) >= 0:
        raise LongctxError(f"{where} has a NUL at byte {nul:,}, so it is binary or UTF-16: {remedy}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise LongctxError(
            f"{where} is not UTF-8: byte {error.start:,} is 0x{data[error.start]:02x}; {remedy}"
        ) from error
