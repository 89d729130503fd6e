"""Decoding beside one long prefill: what a reader of a stream feels, and what the long prompt pays for it."""

from __future__ import annotations

from typing import Any

from longctx.evals.bench.floors import prefill_floor
from longctx.evals.bench.job import Bench, Column, Job, Result, Row
from longctx.evals.bench.runs import Prompts, lengths_for, open_engine, run_cold, warm_up
from longctx.evals.bench.together import Together, percentile

DEFAULT_LENGTHS = (8192,)
DEFAULT_TOKENS = 64
STREAMS = 4
SHORT_PROMPT = 64
STREAM_TOKENS = 8192


def run(job: Job) -> Result:
    """Per length: the long prompt alone; then four streams alone for `tokens` steps, and with the long prompt beside
    them until its first token.
    """
    tokens = job.tokens or DEFAULT_TOKENS
    rows = []
    with open_engine(job, max_running=STREAMS + 1) as (_, engine):
        prompts = Prompts(engine.loaded.vocab_limit)
        longest = engine.partition.longest_request
        warm_up(engine, prompts)
        for length in lengths_for(job, DEFAULT_LENGTHS, longest, least=2):
            ids = prompts.fresh(length - 1)
            job.say(f"reading {len(ids):,} tokens alone")
            alone_s = run_cold(engine, ids, 1, prompts.fresh_salt()).ttft_s
            job.say(f"reading {len(ids):,} tokens beside {STREAMS} streams")
            figures = _beside(engine, prompts, ids, tokens, min(STREAM_TOKENS, longest - SHORT_PROMPT))
            figures |= {
                "long_ttft_alone_s": alone_s,
                "long_slower": figures["long_ttft_s"] / alone_s,
                "itl_target_s": engine.config.scheduler.itl_target_s,
            }
            floor = prefill_floor(engine.loaded.spec, len(ids))
            rows.append(Row(job.model, length, figures, figures["long_ttft_s"], floor))
    return Result(rows)


def _beside(engine: Any, prompts: Prompts, ids: list[int], tokens: int, stream_tokens: int) -> dict[str, Any]:
    """Inter-token latencies of the streams before and while the long prompt is read."""
    runs = Together(engine)
    streams = [runs.add(prompts.fresh(SHORT_PROMPT), stream_tokens, prompts.fresh_salt()) for _ in range(STREAMS)]
    while any(len(runs.lives[s].token_s) < 2 for s in streams):
        runs.step()
    before_s = runs.now_s()
    for _ in range(tokens):
        runs.step()
    start_s = runs.now_s()
    long = runs.add(ids, 1, prompts.fresh_salt())
    while runs.lives[long].end is None:
        runs.step()
    end_s = runs.now_s()
    for request_id in streams:
        engine.cancel(request_id)
    runs.drain()
    alone = _gaps(runs, streams, before_s, start_s)
    mixed = _gaps(runs, streams, start_s, end_s)
    return {
        "itl_alone_p50_s": percentile(alone, 0.5),
        "itl_alone_p99_s": percentile(alone, 0.99),
        "itl_mixed_p50_s": percentile(mixed, 0.5),
        "itl_mixed_p99_s": percentile(mixed, 0.99),
        "itl_mixed_max_s": max(mixed),
        "tokens_meanwhile": len(mixed),
        "long_ttft_s": runs.lives[long].ttft_s,
    }


def _gaps(runs: Together, streams: list[str], from_s: float, until_s: float) -> list[float]:
    return [
        gap
        for s in streams
        for at_s, gap in zip(runs.lives[s].token_s[1:], runs.lives[s].gaps_s, strict=True)
        if from_s < at_s <= until_s
    ]


BENCH = Bench(
    "mixed",
    "inter-token latency of streams beside one long prefill",
    run,
    (
        Column("itl_alone_p50_s", "ITL alone p50 ms", ".0f", 1e3),
        Column("itl_alone_p99_s", "p99", ".0f", 1e3),
        Column("itl_mixed_p50_s", "beside p50 ms", ".0f", 1e3),
        Column("itl_mixed_p99_s", "p99", ".0f", 1e3),
        Column("itl_target_s", "target ms", ".0f", 1e3),
        Column("tokens_meanwhile", "tokens meanwhile", "d"),
        Column("long_ttft_alone_s", "long alone s", ".2f"),
        Column("long_ttft_s", "long beside s", ".2f"),
        Column("long_slower", "x slower"),
        Column("times_floor", "x floor"),
    ),
)
