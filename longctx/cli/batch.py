"""`longctx run --batch`: the requests of a file, many at once, results written as they come."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longctx.cli.interrupt import cancelling_on_interrupt
from longctx.cli.progress import LoadProgress, Meter, say
from longctx.cli.serve import served_name

if TYPE_CHECKING:
    from rich.console import Console

    from longctx.server.batch import Counts
    from longctx.server.batch_file import RequestFile, ResultFile


@dataclass(frozen=True)
class BatchJob:
    """What one invocation asks for. `out` None writes the results to stdout."""

    model: str
    requests: str
    out: str | None
    options: dict[str, Any]
    as_json: bool


def run_batch(job: BatchJob, console: Console) -> bool:
    """Answer what has no result yet; False if it was interrupted. The model is loaded only if something is left."""
    from longctx.server.batch_file import RequestFile, ResultFile

    model = served_name(job.model)
    requests = RequestFile(job.requests, model)
    try:
        results = ResultFile(job.out, requests)
        try:
            return _run(job, model, requests, results, console)
        finally:
            results.close()
    finally:
        requests.close()


def _run(job: BatchJob, model: str, requests: RequestFile, results: ResultFile, console: Console) -> bool:
    from longctx.server.batch import Counts

    left = sum(line.id not in results.done for line in requests.lines)
    say(console, f"batch: {len(requests.lines):,} requests, {len(requests.lines) - left:,} of them have a result")
    counts, finished = Counts(0, skipped=len(requests.lines)), True
    if left:
        counts = _answer(job, model, requests, results, console)
        finished = counts.written == counts.total
        where = "" if job.out is None else f"; results in {job.out}"
        say(console, f"batch: {counts.answered:,} answered, {counts.failed:,} failed{where}")
    if not finished:
        say(console, f"interrupted: {counts.total - counts.written:,} are left; the same command goes on with them")
    if job.as_json:
        print(json.dumps(_report(job, counts)))
    return finished


def _answer(job: BatchJob, model: str, requests: RequestFile, results: ResultFile, console: Console) -> Counts:
    say(console, f"loading {job.model}")
    from longctx.build import build_engine
    from longctx.config import EngineConfig
    from longctx.loop import EngineLoop
    from longctx.server.batch import Batch

    with Meter(console) as meter:
        engine = build_engine(EngineConfig.from_options(job.model, **job.options), LoadProgress(meter))
    with closing(EngineLoop(engine)) as loop, Meter(console) as meter:
        begin_s = time.monotonic()

        def show(counts: Counts) -> None:
            meter.show("batch", counts.written, counts.total, progress_note(counts, time.monotonic() - begin_s))

        batch = Batch(engine, loop, model, requests, results, show)
        with cancelling_on_interrupt(batch.cancel):
            return batch.run()


def progress_note(counts: Counts, elapsed_s: float) -> str:
    """What stands beside the percentage."""
    parts = [f"{counts.written:,} of {counts.total:,} requests", f"{counts.running:,} running"]
    if counts.failed:
        parts.append(f"{counts.failed:,} failed")
    parts.append(f"{counts.read:,} tokens read and {counts.generated:,} generated")
    if elapsed_s > 0:
        parts.append(f"{(counts.read + counts.generated) / elapsed_s:,.0f} tokens/s")
    return ", ".join(parts)


def _report(job: BatchJob, counts: Counts) -> dict[str, Any]:
    return {
        "out": job.out,
        "requests": counts.total + counts.skipped,
        "skipped": counts.skipped,
        "answered": counts.answered,
        "failed": counts.failed,
        "usage": {
            "prompt_tokens": counts.prompt_tokens,
            "completion_tokens": counts.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        },
    }
