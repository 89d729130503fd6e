"""A target for suites that answers as told; its tokens are words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from longctx.evals.target import Answer

NUMBER = re.compile(r"\d{5}")


def reader(prompt: str) -> str:
    """Finds every number of the prompt."""
    return f" {' '.join(NUMBER.findall(prompt))}."


@dataclass
class Fake:
    """A target whose tokens are words, and whose answers are those of `says`."""

    says: Callable[[str], str] = reader
    cached: int | None = 0
    reads: float = 1.0
    name: str = "fake"
    chat: bool = False
    longest: int | None = 4096
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    die_after: int | None = None

    def count(self, prompt: str) -> int:
        return len(prompt.split())

    def ask(self, prompt: str, max_tokens: int, salt: str | None) -> Answer:
        if self.die_after is not None and len(self.asked) == self.die_after:
            raise KeyboardInterrupt
        self.asked.append((prompt, salt))
        text = self.says(prompt)
        return Answer(text, int(self.count(prompt) * self.reads), len(text.split()), self.cached, "stop", 0.1, 0.2)

    def config(self) -> Mapping[str, Any]:
        return {"model": self.name, "chat": self.chat}

    def sizes(self) -> Mapping[str, int]:
        return {}
