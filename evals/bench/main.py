"""Runs one benchmark between two measurements of the machine's limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from longctx.errors import LongctxError
from longctx.evals.bench.job import Bench, Job
from longctx.evals.bench.limits import Limits, measure_limits
from longctx.evals.bench.peers import is_url
from longctx.evals.bench.registry import BENCHES
from longctx.evals.bench.report import machine_line, make_report

Measure = Callable[[], Limits]


def find_bench(name: str) -> Bench:
    """The benchmark called `name`; raises `LongctxError` naming those there are."""
    if name not in BENCHES:
        raise LongctxError(f"there is no benchmark {name!r}; there are {', '.join(BENCHES)}")
    return BENCHES[name]


def run_bench(bench: Bench, job: Job, measure: Measure = measure_limits) -> dict[str, Any]:
    """The report of one benchmark. Raises `LongctxError` for what the job asks wrongly, before anything is measured."""
    job = _checked(bench, job)
    job.say("measuring the machine's limits")
    before = measure()
    result = bench.run(job)
    job.say("measuring the machine's limits again")
    report = make_report(bench, job, result, before, measure())
    if not report["machine"]["valid"]:
        job.say(machine_line(report["machine"]))
    return report


def _checked(bench: Bench, job: Job) -> Job:
    if bench.needs_model and job.model is None:
        raise LongctxError(f"bench {bench.name} needs a MODEL, such as gemma3-270m")
    peer = "URL" if is_url(job.against) else job.against
    if peer is not None and peer not in bench.against:
        known = f"it can be compared with {', '.join(bench.against)}" if bench.against else "it has no peer"
        raise LongctxError(f"--against {job.against} does not go with bench {bench.name}: {known}")
    for name, value in (("--repeats", job.repeats), ("--tokens", job.tokens)):
        if value is not None and value < 1:
            raise LongctxError(f"{name} {value} must be at least 1")
    if not job.speedup > 0:
        raise LongctxError(f"--speedup {job.speedup} must be positive")
    if bench.name == "needle" and job.model is not None:
        job.say(f"bench needle builds its own model; {job.model} takes no part")
        return replace(job, model=None)
    return job
