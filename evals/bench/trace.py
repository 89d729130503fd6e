"""Request traces: who asked when, how long, and which beginnings were shared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longctx.errors import LongctxError
from longctx.evals.bench.runs import FIRST_ID

HASH_TOKENS = 512
"""One hash id of a trace stands for so many prompt tokens."""


@dataclass(frozen=True)
class TraceLine:
    """One request: arrival in seconds from the trace's start, prompt and answer tokens, the ids of its blocks."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]

    def prompt(self, vocab: int) -> list[int]:
        """Token ids below `vocab`; equal hash ids give equal tokens, so what was shared is shared again."""
        blocks = [_tokens(0, i, HASH_TOKENS, vocab) for i in self.hash_ids]
        missing = self.prompt_tokens - HASH_TOKENS * len(blocks)
        if missing > 0:
            blocks.append(_tokens(1, int(self.at_s * 1e3), missing, vocab))
        return [token for block in blocks for token in block][: self.prompt_tokens]


def _tokens(kind: int, name: int, n: int, vocab: int) -> list[int]:
    seed = [kind, abs(name), int(name < 0)]
    return np.random.default_rng(seed).integers(min(FIRST_ID, vocab - 1), vocab, n).tolist()


def read_trace(path: Path) -> list[TraceLine]:
    """A trace in Mooncake's JSONL form (Qin et al. 2024): timestamp in ms, input_length, output_length, hash_ids.

    `hash_ids` name blocks of 512 prompt tokens and may be absent. Sorted by time, starting at 0. Raises `LongctxError`
    naming the first line that is none.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise LongctxError(f"trace {path} cannot be read: {error}") from error
    lines = [_line(path, i + 1, line) for i, line in enumerate(text.splitlines()) if line.strip()]
    if not lines:
        raise LongctxError(f"trace {path} has no lines")
    lines.sort(key=lambda line: line.at_s)
    first_s = lines[0].at_s
    return [TraceLine(x.at_s - first_s, x.prompt_tokens, x.output_tokens, x.hash_ids) for x in lines]


def _line(path: Path, number: int, text: str) -> TraceLine:
    try:
        raw: dict[str, Any] = json.loads(text)
        line = TraceLine(
            float(raw["timestamp"]) / 1e3,
            int(raw["input_length"]),
            int(raw["output_length"]),
            tuple(int(i) for i in raw.get("hash_ids", ())),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise LongctxError(f"trace {path}, line {number}: {type(error).__name__}: {error}") from error
    if line.prompt_tokens < 1 or line.output_tokens < 1:
        raise LongctxError(f"trace {path}, line {number}: input_length and output_length must be at least 1")
    return line
