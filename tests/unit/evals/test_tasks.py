"""Each task says the truth: an independent reader of its text comes to the same answer; and it fits or says why not."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from longctx.errors import LongctxError
from longctx.evals.grid import Key
from longctx.evals.registry import find_suite
from longctx.evals.score import judge
from longctx.evals.suite import EvalJob
from longctx.evals.tasks.registry import TASKS
from longctx.evals.tasks.suite import TaskMaker
from longctx.evals.tasks.task import Draft
from tests.helpers.fake_target import Fake
from tests.helpers.tokenizers import byte_level_tokenizer

SIZES = (0, 1, 7, 100, 1500)


def read_variables(draft: Draft) -> set[str]:
    values: dict[str, str] = {}
    for name, value, source in re.findall(r"Variable (\w+) is (?:(\d+)|the same as (\w+))\.", draft.material):
        assert value or source in values, "a variable is said before it is copied"
        values[name] = value or values[source]
    [asked] = re.findall(r"\d{5}", draft.question)
    return {name for name, value in values.items() if value == asked}


def read_common(draft: Draft) -> set[str]:
    counts = Counter(re.findall(r"\d+\. (\w+)", draft.material)).most_common()
    assert counts[4][1] >= 4 * counts[5][1], "five stand out"
    return {word for word, _ in counts[:5]}


def read_frequent(draft: Draft) -> list[str]:
    counts = Counter(draft.material.split()).most_common()
    assert counts[0][1] > counts[1][1] > counts[2][1] > counts[3][1]
    return [word for word, _ in counts[:3]]


def read_pairs(draft: Draft) -> list[str]:
    pairs = [line.split(": ") for line in draft.material.splitlines()]
    [asked] = re.findall(r"\d{6}", draft.question)
    assert len(dict(pairs)) == len(pairs)
    return [value for key, value in pairs if key == asked]


def read_count(draft: Draft) -> list[str]:
    bells, horns = draft.material.count("The bell rang."), draft.material.count("The horn sounded.")
    assert bells != horns
    return [str(bells)]


def read_order(draft: Draft) -> list[str]:
    return re.findall(r"Then (\w+) came to visit\.", draft.material)


def read_hops(draft: Draft) -> list[str]:
    owner = re.search(r"that (\w+) owns", draft.question)
    assert owner
    [shop] = re.findall(rf"{owner[1]} owns the (\w+ shop)\.", draft.material)
    [street] = re.findall(rf"The {shop} is in (\w+ Street)\.", draft.material)
    return re.findall(rf"{street} is in the city of (\w+)\.", draft.material)


def read_documents(draft: Draft) -> list[str]:
    name = re.search(r"(?:was|does) (\w+ \w+)(?: the \w+)? (?:born|collect)", draft.question)
    assert name
    [line] = [line for line in draft.material.splitlines() if f". {name[1]} was born" in line]
    city, year, hobby = re.findall(r"born in (\w+) in (\d+),.* collects (\w+)\.", line)[0]
    return [hobby if "collect" in draft.question else year if "year" in draft.question else city]


def read_line(draft: Draft) -> list[str]:
    number = re.search(r"Repeat line (\d+):$", draft.question)
    assert number
    [line] = re.findall(rf"^Line {number[1]}: (.*)$", draft.material, re.MULTILINE)
    assert not re.search(rf"Repeat line {number[1]}:", draft.material), "the line asked for is no example"
    assert len(re.findall(r"^Repeat line", draft.material, re.MULTILINE)) == 3
    return line.split()


def read_sales(draft: Draft) -> list[str]:
    totals: Counter[str] = Counter()
    for name, count in re.findall(r"(\w+) sold (\d+) ", draft.material):
        totals[name] += int(count)
    (best, most), (_, next_most) = totals.most_common(2)
    assert len(totals) == 5 and most >= 1.3 * next_most
    return [best]


READERS: dict[str, Callable[[Draft], Sequence[str] | set[str]]] = {
    "variable-tracking": read_variables,
    "common-words": read_common,
    "frequent-words": read_frequent,
    "key-value": read_pairs,
    "counting": read_count,
    "ordering": read_order,
    "multi-hop": read_hops,
    "qa-distractors": read_documents,
    "many-shot-copy": read_line,
    "aggregation": read_sales,
}


def test_every_task_is_read_here() -> None:
    assert set(READERS) == set(TASKS) and all(name == task.name for name, task in TASKS.items())


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("seed", range(5))
def test_a_reader_of_the_text_finds_the_facts(name: str, seed: int) -> None:
    task = TASKS[name]
    for size in SIZES:
        draft = task.draw(random.Random(seed), task.least + size)
        answer = READERS[name](draft)
        assert (list(answer) if draft.ordered else set(answer)) == (
            list(draft.facts) if draft.ordered else set(draft.facts)
        )
        assert judge(draft.facts, ", ".join(draft.facts), ordered=draft.ordered).score == 1.0
        assert draft == task.draw(random.Random(seed), task.least + size), "the same random draws the same problem"
        if not draft.ordered and draft.quoted:
            assert judge(draft.facts, draft.question + draft.stem).score == 0.0, "the question is not its answer"


@pytest.mark.parametrize("name", TASKS)
def test_more_material_is_never_shorter(name: str) -> None:
    task = TASKS[name]
    lengths = [len(task.draw(random.Random(1), task.least + size).material.split()) for size in range(0, 300, 7)]
    assert all(b >= a for a, b in pairwise(lengths)) and lengths[-1] > 2 * lengths[0]


@pytest.mark.parametrize("length", [128, 256, 512, 1024, 4096])
@pytest.mark.parametrize("chat", [False, True])
def test_every_task_fits_or_says_why_not(length: int, chat: bool) -> None:
    """lm-evaluation-harness#2963: at short lengths a generator looped for ever, since its minimum could not fit."""
    tokenizer = byte_level_tokenizer(1000)

    class Target(Fake):
        def count(self, prompt: str) -> int:
            return len(tokenizer(prompt).input_ids)

    maker = TaskMaker(EvalJob(), Target(chat=chat))
    built = 0
    for name, task in TASKS.items():
        start = time.monotonic()
        try:
            problem = maker.problem(Key(length, None, name))
        except LongctxError as error:
            assert re.match(rf"{name} at {length} tokens: \d+ tokens are too few", str(error))
        else:
            built += 1
            assert length * 0.97 <= problem.tokens + task.answer_tokens <= length
            assert problem.tokens == len(tokenizer(problem.prompt).input_ids)
        assert time.monotonic() - start < 5
    assert built == len(TASKS) or length < 4096


def test_the_suite_asks_every_task_at_every_length() -> None:
    def solver(prompt: str) -> str:
        material = prompt.split("\n\n", 1)[1]
        question = material.rsplit("\n\n", 1)[1]
        for name, task in TASKS.items():
            if prompt.startswith(task.intro.split("{}")[0]):
                draft = Draft(material.rsplit("\n\n", 1)[0], question.rsplit("? ", 1)[0], "", ("x",))
                if name == "many-shot-copy":
                    draft = Draft(draft.material, question, "", ("x",))
                return " " + ", ".join(READERS[name](draft))
        raise AssertionError(prompt[:100])

    target = Fake(says=solver, longest=2048)
    report = find_suite("tasks").run(EvalJob(lengths=(1024, 2048), samples=2), target)
    assert report["score"] == 1.0, [(c["task"], c["tries"]) for c in report["cells"] if c["score"] < 1]
    assert len(report["cells"]) == 2 * len(TASKS) and all(cell["depth"] is None for cell in report["cells"])
    assert report["failure"] is None and report["suspect"] is None and report["controls"] == []
    assert len(target.asked) == 4 * len(TASKS)
    assert len({prompt for prompt, _ in target.asked}) == len(target.asked)


def test_too_short_a_length_is_refused_before_the_first_question() -> None:
    target: Any = Fake()
    with pytest.raises(LongctxError, match="common-words at 128 tokens: 88 tokens are too few"):
        find_suite("tasks").run(EvalJob(lengths=(128,), names=("key-value", "common-words")), target)
    assert not target.asked
