"""The suite `niah`: lengths by depths, each cell one hunt, with controls beside them."""

from __future__ import annotations

import itertools
from typing import Any

from longctx.errors import LongctxError
from longctx.evals.grid import Grid, Key, Problem
from longctx.evals.haystack import Haystack, open_haystack
from longctx.evals.lengths import Fitter
from longctx.evals.niah import VARIANTS, PromptMaker, draw
from longctx.evals.report import make_report
from longctx.evals.run import check_job, finish, open_store, run_config
from longctx.evals.suite import EvalJob, Suite, lengths_of
from longctx.evals.target import Target

DEPTHS, HAYSTACK = (0.0, 0.25, 0.5, 0.75, 1.0), "filler"


def run(job: EvalJob, target: Target) -> dict[str, Any]:
    """The report of one grid. Raises `LongctxError` for what cannot be asked, before the model is."""
    check_job(job, target, SUITE)
    lengths, names = lengths_of(job, target), job.names or SUITE.default
    haystack = open_haystack(job.haystack or HAYSTACK)
    depths = DEPTHS if job.depths is None else job.depths
    hunts = Hunts(job, target, haystack)
    keys = [
        Key(length, depth, name, sample)
        for name, length, depth, sample in itertools.product(names, lengths, depths, range(job.samples))
    ]
    for name in names:
        hunts.problem(next(key for key in keys if key.task == name))  # the shortest: too short is said at once
    config = run_config(job, target, SUITE, lengths, names) | {
        "depths": list(depths),
        "haystack": {"name": haystack.name, "digest": haystack.digest, "sentences": len(haystack.sentences)},
    }
    with open_store(job, config) as store:
        grid = Grid(target, store, hunts.problem, hunts.control, job.warm, job.control, job.say)
        grid.run(keys)
        report = make_report(SUITE.name, store.records, config, target.sizes(), warm=job.warm)
    return finish(job, report)


class Hunts:
    """Makes each key's prompt, with its needles and without."""

    def __init__(self, job: EvalJob, target: Target, haystack: Haystack):
        self._job = job
        self._haystack = haystack
        self._maker = PromptMaker(haystack, Fitter(target.count), target.chat, pad_last=job.warm)

    def problem(self, key: Key) -> Problem:
        return self._make(key, hide=True)

    def control(self, key: Key) -> Problem:
        return self._make(key, hide=False)

    def _make(self, key: Key, hide: bool) -> Problem:
        assert key.depth is not None
        variant = VARIANTS[key.task]
        room = self._job.max_tokens or variant.answer_tokens
        if key.length <= room:
            raise LongctxError(f"--lengths {key.length} leaves no prompt: the answer alone has room for {room} tokens")
        hunt = draw(variant, self._job.seed, key.length, key.depth, key.sample, self._haystack)
        prompt = self._maker.make(hunt, key.length - room, hide)
        return Problem(prompt.text, prompt.tokens, hunt.facts, room, prompt.depths)


SUITE = Suite(
    "niah",
    "needles in a haystack, by length and depth",
    tuple(VARIANTS),
    ("single",),
    has_depths=True,
    run=run,
)
