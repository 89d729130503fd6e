"""What every suite does around its grid: checks the job, opens the store, writes the results."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import longctx
from longctx.errors import LongctxError
from longctx.evals.html import html_page
from longctx.evals.store import Memory, Store
from longctx.evals.suite import CONTROLS, EvalJob, Suite
from longctx.evals.target import Target


def check_job(job: EvalJob, target: Target, suite: Suite) -> None:
    """Raise `LongctxError` for what a job asks wrongly, naming the option."""
    for length in job.lengths or ():
        if target.longest is not None and length > target.longest:
            raise LongctxError(
                f"--lengths {length} is beyond the {target.longest} tokens that {target.name} has room for: "
                "shorten it, or raise --max-model-len or --kv-memory"
            )
    for depth in job.depths or ():
        if not 0.0 <= depth <= 1.0:
            raise LongctxError(f"--depths {depth} must lie between 0, the front, and 1, the end")
    for name in job.names or ():
        if name not in suite.names:
            raise LongctxError(f"--tasks {name}: {suite.name} has {', '.join(suite.names)}")
    if job.control not in CONTROLS:
        raise LongctxError(f"--control {job.control} must be {', '.join(CONTROLS)}")
    for option, value in (("--samples", job.samples), ("--max-tokens", job.max_tokens)):
        if value is not None and value < 1:
            raise LongctxError(f"{option} {value} must be at least 1")


def run_config(
    job: EvalJob, target: Target, suite: Suite, lengths: Sequence[int], names: Sequence[str]
) -> dict[str, Any]:
    """Everything that decides the results, as it is kept beside them."""
    return {
        "suite": suite.name,
        "lengths": list(lengths),
        "tasks": list(names),
        "samples": job.samples,
        "seed": job.seed,
        "max_tokens": job.max_tokens,
        "warm": job.warm,
        "control": job.control,
        "longctx": longctx.__version__,
        **target.config(),
    }


def open_store(job: EvalJob, config: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """The job's folder, or memory where none was named."""
    return nullcontext(Memory()) if job.out is None else Store(job.out, config)


def finish(
    job: EvalJob, report: dict[str, Any], page: Callable[[Mapping[str, Any]], str] = html_page
) -> dict[str, Any]:
    """Write JSON and page into the job's folder, each only if it is not there yet."""
    report["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    if job.out is None:
        return report
    _write_new(job.out / "report.json", lambda path: path.write_text(json.dumps(report) + "\n"))
    _write_new(job.out / "report.html", lambda path: path.write_text(page(report)))
    return report


def _write_new(path: Path, write: Callable[[Path], object]) -> None:
    """Whole or not at all, and never over an older one: a finished folder stays what it was."""
    if path.exists():
        return
    unfinished = path.with_name(path.name + ".new")
    try:
        write(unfinished)
        unfinished.rename(path)
    except OSError as error:
        raise LongctxError(f"{path} cannot be written: {error.strerror or error}") from error
