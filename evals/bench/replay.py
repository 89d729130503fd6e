"""A recorded load, replayed: real arrival times, lengths and shared beginnings, with tokens of our own."""

from __future__ import annotations

from pathlib import Path

from longctx.errors import LongctxError
from longctx.evals.bench.job import Bench, Column, Job, Result, Row
from longctx.evals.bench.runs import Prompts, open_engine, warm_up
from longctx.evals.bench.together import Arrival, Together, percentile
from longctx.evals.bench.trace import read_trace

MAX_RUNNING = 8


def run(job: Job) -> Result:
    """The trace's requests at their times divided by `speedup`; requests longer than the model are left out and
    counted.
    """
    if job.trace is None:
        raise LongctxError("bench replay needs --trace FILE.jsonl")
    lines = read_trace(Path(job.trace).expanduser())
    with open_engine(job, max_running=MAX_RUNNING) as (_, engine):
        prompts = Prompts(engine.loaded.vocab_limit)
        longest = engine.partition.longest_request
        fitting = [line for line in lines if line.prompt_tokens + line.output_tokens <= longest]
        if not fitting:
            raise LongctxError(f"no request of the trace fits into {longest:,} tokens")
        warm_up(engine, prompts)
        salt = prompts.fresh_salt()
        arrivals = [
            Arrival(line.at_s / job.speedup, line.prompt(engine.loaded.vocab_limit), line.output_tokens, salt)
            for line in fitting
        ]
        job.say(f"replaying {len(arrivals)} requests over {arrivals[-1].at_s:.0f} s")
        runs = Together(engine)
        lives = runs.run(arrivals)
        took_s = runs.now_s()
    prompt_tokens = sum(x.prompt_tokens for x in lives)
    gaps = [gap for life in lives for gap in life.gaps_s] or [0.0]
    figures = {
        "requests": len(lives),
        "left_out": len(lines) - len(fitting),
        "seconds": took_s,
        "hit_rate": sum(x.cached_tokens for x in lives) / prompt_tokens,
        "prefill_tokens": prompt_tokens - sum(x.cached_tokens for x in lives),
        "decode_tokens": sum(len(x.token_s) for x in lives),
        "ttft_p50_s": percentile([x.ttft_s for x in lives], 0.5),
        "ttft_p99_s": percentile([x.ttft_s for x in lives], 0.99),
        "itl_p50_s": percentile(gaps, 0.5),
        "itl_p99_s": percentile(gaps, 0.99),
        "speedup": job.speedup,
    }
    return Result([Row(job.model, prompt_tokens, figures)])


BENCH = Bench(
    "replay",
    "a recorded trace of requests, replayed",
    run,
    (
        Column("requests", "requests", "d"),
        Column("left_out", "left out", "d"),
        Column("seconds", "seconds", ".1f"),
        Column("hit_rate", "hit rate", ".1%"),
        Column("ttft_p50_s", "TTFT p50 s", ".2f"),
        Column("ttft_p99_s", "p99", ".2f"),
        Column("itl_p50_s", "ITL p50 ms", ".0f", 1e3),
        Column("itl_p99_s", "p99", ".0f", 1e3),
    ),
)
