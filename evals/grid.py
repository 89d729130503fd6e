"""Asks every cell of a grid once, cold unless told otherwise, and keeps what came of it; goes on where it stopped."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from longctx.evals.reference import Reference
from longctx.evals.score import FOUND, has_fact, judge
from longctx.evals.suite import Say
from longctx.evals.target import Answer, LLMTarget, Target

CELL, CONTROL, REFERENCE = "cell", "control", "reference"
"""What a record is of: a cell, the same question without its needle, the same cell through Hugging Face."""


@dataclass(frozen=True)
class Key:
    """Which question: one try of one task at one length, and one depth where the task has such a thing."""

    length: int
    depth: float | None
    task: str
    sample: int = 0

    def __str__(self) -> str:
        depth = "" if self.depth is None else f", depth {self.depth:g}"
        return f"{self.task}, {self.length:,} tokens{depth}"


@dataclass(frozen=True)
class Problem:
    """One prompt with the facts its answer must have; `tokens` as counted, `depths` where its needles are.

    `quoted`: each fact stands in the prompt as it is, so that one which does not is the suite's mistake.
    """

    prompt: str
    tokens: int
    facts: tuple[str, ...]
    answer_tokens: int
    depths: tuple[float, ...] = ()
    ordered: bool = False
    quoted: bool = True


class Records(Protocol):
    """Where results go: a folder or only memory."""

    records: list[dict[str, Any]]

    def add(self, record: Mapping[str, Any]) -> None: ...


@dataclass
class Grid:
    """One run over a grid. `make` gives a key's problem, `make_control` the same one without what is looked for.

    What the store already holds is not asked again. Keeps the answers of the current length only.
    """

    target: Target
    store: Records
    make: Callable[[Key], Problem]
    make_control: Callable[[Key], Problem] | None = None
    warm: bool = False
    control: str = "one"
    say: Say = lambda line: None
    _run: str = field(default_factory=lambda: secrets.token_hex(8), init=False)
    _answers: dict[Key, Answer] = field(default_factory=dict, init=False)
    _reference: Reference | None = field(default=None, init=False)

    def run(self, keys: Sequence[Key]) -> None:
        """Ask all of them, length by length, each length's controls behind its cells."""
        for length in sorted({key.length for key in keys}):
            ours = [key for key in keys if key.length == length]
            self._answers.clear()
            for key in ours:
                if self._find(CELL, key) is None:
                    self._ask_cell(key)
            for task in dict.fromkeys(key.task for key in ours) if self.make_control is not None else ():
                same = [key for key in ours if key.task == task]
                if not any(self._find(CONTROL, key) for key in same):
                    self._ask_control(same[len(same) // 2])
            for key in self._to_compare(ours):
                if self._find(REFERENCE, key) is None:
                    self._compare(key)

    def _ask_cell(self, key: Key) -> None:
        problem = self.make(key)
        answer = self._answers[key] = self._answer(key, problem)
        cached = "" if answer.cached_tokens is None else f", {answer.cached_tokens:,} tokens cached"
        verdict = judge(
            problem.facts,
            answer.text,
            in_prompt=not problem.quoted or all(has_fact(fact, problem.prompt) for fact in problem.facts),
            prompt_cut=answer.prompt_tokens < problem.tokens,
            answer_cut=answer.finish_reason == "length",
            ordered=problem.ordered,
        )
        self.store.add(
            {
                **_identity(CELL, key),
                "score": verdict.score,
                "outcome": verdict.outcome,
                "facts": list(problem.facts),
                "answer": answer.text,
                "counted_tokens": problem.tokens,
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
                "cached_tokens": answer.cached_tokens,
                "finish_reason": answer.finish_reason,
                "needle_depths": list(problem.depths),
                "ttft_s": answer.ttft_s,
                "seconds": answer.seconds,
            }
        )
        self.say(f"{key}: {verdict.outcome} ({answer.seconds:.1f} s{cached})")

    def _ask_control(self, key: Key) -> None:
        """The question without its needle: whoever answers it has the answer from elsewhere."""
        assert self.make_control is not None
        problem = self.make_control(key)
        answer = self._answer(key, problem, "control")
        verdict = judge(problem.facts, answer.text)
        outcome = "leak" if verdict.score > 0 else "clean"
        self.store.add({**_identity(CONTROL, key), "outcome": outcome, "answer": answer.text})
        self.say(f"{key}, without the needle: {outcome}")

    def _to_compare(self, keys: Sequence[Key]) -> list[Key]:
        """Which cells the control answers: of each length the first that missed, or else the one in the middle."""
        if self.control == "none" or not isinstance(self.target, LLMTarget):
            return []
        if self.control == "all":
            return list(keys)
        missed = [key for key in keys if (self._find(CELL, key) or {}).get("outcome") != FOUND]
        return missed[:1] or [keys[len(keys) // 2]]

    def _compare(self, key: Key) -> None:
        assert isinstance(self.target, LLMTarget)
        if self._reference is None:
            self.say("loading the control: Hugging Face, float32, no prefix cache")
            self._reference = Reference(self.target.llm)
        problem = self.make(key)
        answer = self._answers.get(key) or self._answer(key, problem, "again")
        self.say(f"{key}: the control reads {len(answer.prompt_ids):,} tokens")
        found = self._reference.compare(answer.prompt_ids, answer.token_ids, answer.logprobs, problem.answer_tokens)
        self.store.add(
            {
                **_identity(REFERENCE, key),
                "verdict": found.verdict,
                "max_logprob_difference": found.max_difference,
                "same_tokens": found.same_tokens,
            }
        )
        self.say(f"{key}, by the control: {found.verdict}, logprobs differ by {found.max_difference:.1e}")

    def _answer(self, key: Key, problem: Problem, purpose: str = "cell") -> Answer:
        salt = self._run if self.warm else f"{self._run}/{purpose}/{key.task}/{key.length}/{key.depth}/{key.sample}"
        return self.target.ask(problem.prompt, problem.answer_tokens, salt)

    def _find(self, kind: str, key: Key) -> dict[str, Any] | None:
        wanted = _identity(kind, key)
        return next((r for r in self.store.records if all(r.get(k) == v for k, v in wanted.items())), None)


def _identity(kind: str, key: Key) -> dict[str, Any]:
    return {"kind": kind, "length": key.length, "depth": key.depth, "task": key.task, "sample": key.sample}
