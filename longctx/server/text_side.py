"""The text side of a model, without its weights: prompts and messages to ids by its own rules, ids to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longctx.errors import ModelError
from longctx.models.tokenizer import encode_prompt, encode_rendered, load_tokenizer, render_chat
from longctx.server.errors import ApiError
from longctx.server.time_limit import TimeLimit, time_limit

USUAL_CHARS_PER_TOKEN = 6
"""A text longer than this per position is counted piece by piece before it is tokenized in one."""

MOST_PIECE_CHARS = 2**18
SEAM_TOKENS = 64
"""How many tokens more a text may have where it is cut than in one: a long word falls apart, most cuts cost one."""

MAX_TEMPLATE_CHARS = 2**20
TEMPLATE_ROOM_CHARS = 2**20


@dataclass(frozen=True)
class TemplateTraits:
    """What a chat template knows of, read from its source."""

    variables: frozenset[str] = frozenset()
    developer_role: bool = False

    @property
    def tools(self) -> bool:
        return "tools" in self.variables


class TextSide:
    """A model's tokenizer and chat template. `longest` is the most tokens that a prompt may have.

    Templates run in the sandbox of transformers, jinja's immutable one, for `template_s` at most. What cannot be is an
    `ApiError`: a text that is far too long is refused after counting its beginning, so that a refusal costs time and
    memory by the model's length and not by the text's. For one thread at a time, `tokenizer.decode` aside.
    """

    def __init__(self, tokenizer: Any, longest: int, chat_template: str | None = None, template_s: float = 5.0):
        self.tokenizer = tokenizer
        self.longest = longest
        self.template_s = template_s
        if tokenizer is not None:
            tokenizer("a")  # the first call turns off truncation and padding that a tokenizer's file may ask for
        if chat_template is not None and tokenizer is not None:
            tokenizer.chat_template = read_template(chat_template)
        self.traits = _traits(tokenizer.chat_template if tokenizer is not None else None)

    @classmethod
    def load(cls, folder: Path, longest: int, chat_template: str | None = None, template_s: float = 5.0) -> TextSide:
        """From a model's folder. Raises ModelError for a tokenizer or template that cannot be read."""
        return cls(load_tokenizer(folder), longest, chat_template, template_s)

    @property
    def has_template(self) -> bool:
        return self.tokenizer is not None and bool(self.tokenizer.chat_template)

    def encode(self, text: str, param: str = "prompt", add_special_tokens: bool = True) -> np.ndarray:
        """A plain prompt's ids [n] int32, BOS by the tokenizer's own rule."""
        tokenizer = self._need_tokenizer()
        self._check_length(text, param)
        ids = encode_prompt(tokenizer, text) if add_special_tokens else encode_rendered(tokenizer, text)
        return np.array(ids, dtype=np.int32)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        param: str = "messages",
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> np.ndarray:
        """A conversation's ids [n] int32 through the model's template; `options` are its variables."""
        tokenizer = self._need_template(param)
        room = 2 * sum(_size(message) for message in messages) + _size(options) + TEMPLATE_ROOM_CHARS
        try:
            with time_limit(self.template_s):
                text = render_chat(tokenizer, messages, add_generation_prompt, **options)
        except TimeLimit:
            message = f"the chat template took more than {self.template_s:g} s for these messages"
            raise ApiError(400, message, code="invalid_messages", param=param) from None
        except ModelError as error:
            raise ApiError(400, clip(str(error), 500), code="invalid_messages", param=param) from error
        if len(text) > room:
            raise ApiError(400, f"the chat template made more than {room:,} characters of these messages", param=param)
        self._check_length(text, param)
        ids = np.array(encode_rendered(tokenizer, text), dtype=np.int32)
        if not len(ids):
            raise ApiError(400, "the chat template made an empty prompt of these messages", param=param)
        return ids

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids, special tokens spelled out."""
        tokenizer = self._need_tokenizer()
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def spellings(self, ids: np.ndarray) -> list[str]:
        """Each id's entry in the vocabulary."""
        return [token or "" for token in self._need_tokenizer().convert_ids_to_tokens(ids.tolist())]

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: send the prompt as token ids to /v1/completions")
        return self.tokenizer

    def _need_template(self, param: str) -> Any:
        tokenizer = self._need_tokenizer()
        if not self.has_template:
            raise ApiError(
                400,
                "this model has no chat template (it is a base model): send a plain prompt to /v1/completions, start "
                "the server with --chat-template FILE, or serve an instruction-tuned model",
                code="no_chat_template",
                param=param,
            )
        return tokenizer

    def _check_length(self, text: str, param: str) -> None:
        if len(text) <= USUAL_CHARS_PER_TOKEN * self.longest:
            return
        counted, size = 0, min(MOST_PIECE_CHARS, max(4096, 2 * self.longest))
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            counted += len(self.tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]) - SEAM_TOKENS
            if counted > self.longest:
                end = start + len(piece)
                where = "" if end == len(text) else f" in its first {end:,} of {len(text):,} characters"
                raise too_long(counted, self.longest, param, "at least ", where)


class UnreadText(TextSide):
    """The same text side where only a body's fields matter: no text is read, each counts as one token.

    Unlike the whole one it may be used beside it, in another thread.
    """

    def __init__(self, whole: TextSide):
        self.tokenizer, self.traits = whole.tokenizer, whole.traits

    def encode(self, text: str, param: str = "prompt", add_special_tokens: bool = True) -> np.ndarray:
        self._need_tokenizer()
        return np.zeros(1, dtype=np.int32)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, param: str = "messages", **_: Any) -> np.ndarray:
        self._need_template(param)
        return np.zeros(1, dtype=np.int32)

    def decode(self, ids: np.ndarray) -> str:
        self._need_tokenizer()
        return ""


def too_long(num_tokens: int, longest: int, param: str, at_least: str = "", where: str = "") -> ApiError:
    """The refusal of a prompt that is longer than any request, before it is sent to the engine."""
    return ApiError(
        400,
        f"the prompt has {at_least}{num_tokens:,} tokens{where} and the longest request that this server takes "
        f"{longest:,}: shorten the prompt by {at_least}{num_tokens + 1 - longest:,} tokens, which leaves 1 for the "
        "answer",
        code="context_length_exceeded",
        param=param,
    )


def read_template(source: str) -> str:
    """A chat template given as a file's path or as its own text. Raises ModelError."""
    if "{" in source or "\n" in source:
        return source
    path = Path(source)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"--chat-template {source} cannot be read: {error}") from error
    if len(text) > MAX_TEMPLATE_CHARS or not text.strip():
        raise ModelError(f"--chat-template {source} must have 1 to {MAX_TEMPLATE_CHARS:,} characters, a jinja template")
    return text


def clip(text: str, most: int) -> str:
    """At most so many characters of a text that may come from outside, in one line and printable."""
    line = "".join(char if char.isprintable() else " " for char in text[: most + 1])
    return line if len(line) <= most else line[: most - 3] + "..."


def _traits(template: Any) -> TemplateTraits:
    """Read from the source; of several named templates all count."""
    sources = template.values() if isinstance(template, Mapping) else [template] if template else []
    variables: set[str] = set()
    for source in sources:
        try:
            tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols", _Generation]).parse(source)
        except (TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template is no valid jinja template: {clip(str(error), 300)}") from error
        # Not meta.find_undeclared_variables: it leaves out a variable that the template may also set itself.
        variables.update(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
    return TemplateTraits(frozenset(variables), any("developer" in source for source in sources))


class _Generation(Extension):
    """Reads Hugging Face's own tag {% generation %}, which marks the assistant's part of a template."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.If(nodes.Const(True), body, [], [], lineno=line)


def _size(value: Any) -> int:
    """About how many characters a template would write of a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(item) + 8 for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(_size(item) + 8 for item in value)
    return 16
