"""What a format does to answers: needles, a task that is no search, and greedy texts, each beside the exact run's."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from longctx.errors import LongctxError
from longctx.evals.grid import CELL, Grid, Key, Problem
from longctx.evals.haystack import open_haystack
from longctx.evals.niah_suite import HAYSTACK, Hunts
from longctx.evals.store import Memory
from longctx.evals.suite import EvalJob
from longctx.evals.target import LLMTarget
from longctx.evals.tasks.registry import TASKS
from longctx.evals.tasks.suite import TaskMaker

DEPTHS = (0.0, 0.5, 1.0)
TASK = "common-words"
GREEDY_TOKENS = 256
PROMPTS = (
    "The three most important inventions of the nineteenth century were",
    "Captain Mirabel Stone sailed into the harbour at dawn. She had not slept for two days, and",
    'def merge_sorted(left, right):\n    """Merge two sorted lists into one."""\n',
)
"""Texts to go on with greedily: facts, a story, code."""


def ask_needles(job: EvalJob, target: LLMTarget, length: int) -> dict[str, Any] | None:
    """A few needles at `length`: score and answers. None where the length has no room for the question."""
    hunts = Hunts(replace(job, max_tokens=None), target, open_haystack(HAYSTACK))
    depths = DEPTHS if job.depths is None else job.depths
    return _ask(target, hunts.problem, [Key(length, depth, "single") for depth in depths])


def ask_tasks(job: EvalJob, target: LLMTarget, length: int) -> dict[str, Any] | None:
    """The job's tasks (one that is no search, if none is named): score and answers, or None without room."""
    maker = TaskMaker(replace(job, max_tokens=None), target)
    keys = [Key(length, None, name, sample) for name in job.names or (TASK,) for sample in range(job.samples)]
    assert all(key.task in TASKS for key in keys)
    return _ask(target, maker.problem, keys)


def _ask(target: LLMTarget, make: Callable[[Key], Problem], keys: Sequence[Key]) -> dict[str, Any] | None:
    try:
        for key in keys:
            make(key)
    except LongctxError:
        return None
    store = Memory()
    Grid(target, store, make, None, control="none").run(keys)
    cells = [record for record in store.records if record["kind"] == CELL]
    return {
        "score": statistics.fmean(cell["score"] for cell in cells),
        "answers": [cell["answer"] for cell in cells],
        "outcomes": [cell["outcome"] for cell in cells],
    }


def write_greedy(target: LLMTarget, max_tokens: int) -> list[dict[str, Any]]:
    """The greedy continuation of each of `PROMPTS`, as tokens and text."""
    salt = secrets.token_hex(8)
    texts = []
    for prompt in PROMPTS:
        answer = target.ask(prompt, max_tokens, salt)
        texts.append({"prompt": prompt, "text": answer.text, "token_ids": list(answer.token_ids)})
    return texts


def first_difference(exact: Sequence[int], other: Sequence[int]) -> int | None:
    """The index of the first token that differs, one text's end included; None for equal ones."""
    for i, (a, b) in enumerate(zip(exact, other, strict=False)):
        if a != b:
            return i
    return None if len(exact) == len(other) else min(len(exact), len(other))
