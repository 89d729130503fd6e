"""The suite `tasks`: tasks by lengths, each with as much material as fits."""

from __future__ import annotations

import itertools
import random
from typing import Any

from longctx.errors import LongctxError
from longctx.evals.grid import Grid, Key, Problem
from longctx.evals.lengths import Fitter
from longctx.evals.report import make_report
from longctx.evals.run import check_job, finish, open_store, run_config
from longctx.evals.suite import EvalJob, Suite, lengths_of
from longctx.evals.target import Target
from longctx.evals.tasks.registry import TASKS
from longctx.evals.tasks.task import Draft, Task


def run(job: EvalJob, target: Target) -> dict[str, Any]:
    """The report of tasks by lengths. Raises `LongctxError` for what cannot be asked, before the model is."""
    check_job(job, target, SUITE)
    lengths, names = lengths_of(job, target), job.names or SUITE.default
    maker = TaskMaker(job, target)
    keys = [
        Key(length, None, name, sample)
        for name, length, sample in itertools.product(names, lengths, range(job.samples))
    ]
    for name in names:
        maker.problem(next(key for key in keys if key.task == name))  # the shortest: too short is said at once
    config = run_config(job, target, SUITE, lengths, names)
    with open_store(job, config) as store:
        Grid(target, store, maker.problem, None, job.warm, job.control, job.say).run(keys)
        report = make_report(SUITE.name, store.records, config, {}, warm=job.warm)
    return finish(job, report)


class TaskMaker:
    """Makes each key's prompt: the largest problem that leaves room for the answer, padded to the token."""

    def __init__(self, job: EvalJob, target: Target):
        self._job = job
        self._chat = target.chat
        self._fitters = {name: Fitter(target.count) for name in TASKS}  # a unit of each task has its own length

    def problem(self, key: Key) -> Problem:
        """Raises `LongctxError` where the least material and the question are longer than the key's length."""
        task = TASKS[key.task]
        room = self._job.max_tokens or task.answer_tokens
        seed = f"{self._job.seed}/{task.name}/{key.length}/{key.sample}"

        def draft(size: int) -> Draft:
            return task.draw(random.Random(seed), task.least + size)

        try:
            fitted = self._fitters[task.name].fit(
                lambda size, padding: self._text(task, draft(size), padding), key.length - room
            )
        except LongctxError as error:
            raise LongctxError(f"{task.name} at {key.length} tokens: {error}") from error
        drawn = draft(fitted.size)
        return Problem(fitted.text, fitted.tokens, drawn.facts, room, (), drawn.ordered, drawn.quoted)

    def _text(self, task: Task, draft: Draft, padding: int) -> str:
        stem = "" if self._chat else draft.stem
        return f"{task.intro.format(' very' * padding)}\n\n{draft.material}\n\n{draft.question}{stem}"


SUITE = Suite(
    "tasks",
    "tasks beyond finding: tracking, counting, ordering, adding up, ...",
    tuple(TASKS),
    tuple(TASKS),
    has_depths=False,
    run=run,
)
