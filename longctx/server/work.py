"""What a checked body asks for: the engine's work, and how the client wants its answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longctx.params import SamplingParams


@dataclass(frozen=True, eq=False)
class Work:
    """One engine request: `token_ids` [n] int32, one choice of the answer. Choices of one prompt share its array."""

    token_ids: np.ndarray
    params: SamplingParams
    choice: int


@dataclass(frozen=True)
class ReplyOptions:
    """How the answer is to look. Choice i belongs to prompt i // n.

    `model` is the name to answer with. `echo` has the text of each prompt, or is None when it is not to be repeated.
    `logprobs` is how many alternatives to show beside each generated token (0: only its own), None for none at all;
    `prompt_logprobs` the same for the prompt's tokens. `timeout_s` is the deadline that the client or the server set.
    `tools` are the names of the functions that the model was told of. `extra` is what one endpoint alone repeats in its
    answer (`metadata`, `instructions`, ...), JSON values only.
    """

    model: str
    stream: bool = False
    include_usage: bool = False
    return_progress: bool = False
    n: int = 1
    echo: tuple[str, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    tools: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A body, checked and tokenized: `endpoint` is "completions", "chat" or "responses"."""

    endpoint: str
    works: tuple[Work, ...]
    options: ReplyOptions
