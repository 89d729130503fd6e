"""A second question on a document that was read before: what it costs beyond a cold prompt of its own length."""

from __future__ import annotations

from typing import Any

from longctx.errors import EngineError
from longctx.evals.bench.floors import prefill_floor
from longctx.evals.bench.job import Bench, Column, Job, Result, Row
from longctx.evals.bench.runs import (
    Prompts,
    lengths_for,
    median,
    open_engine,
    run_cold,
    run_request,
    warm_up,
)

DEFAULT_LENGTHS = (8192,)
DEFAULT_QUESTION = 64


def run(job: Job) -> Result:
    """Per length: the document with a first question, cold; then `repeats` times another question of `tokens` tokens
    on it, and a cold prompt of as many tokens, in turn. A length is document + question + one generated token.
    """
    k = job.tokens or DEFAULT_QUESTION
    rows = []
    # A pool of exactly one request's size would evict the document's last block for the question asked beside it.
    with open_engine(job, max_running=2) as (_, engine):
        prompts = Prompts(engine.loaded.vocab_limit)
        lengths = lengths_for(job, DEFAULT_LENGTHS, engine.partition.longest_request, least=k + 2)
        warm_up(engine, prompts)
        for length in lengths:
            document, salt = prompts.fresh(length - k - 1), prompts.fresh_salt()
            job.say(f"reading a document of {len(document):,} tokens")
            first = run_cold(engine, [*document, *prompts.fresh(k)], 1, salt)
            seconds, cold, extra, cached = [], [], [], []
            for repeat in range(job.repeats):
                job.say(f"question of {k} tokens on {len(document):,}, {repeat + 1} of {job.repeats}")
                second = _second_question(engine, prompts, document, k, salt)
                alone = run_cold(engine, prompts.fresh(k), 1, prompts.fresh_salt())
                seconds.append(second.ttft_s)
                cold.append(alone.ttft_s)
                extra.append(second.ttft_s - alone.ttft_s)
                cached.append(second.cached_tokens)
            figures: dict[str, Any] = {
                "question_tokens": k,
                "first_ttft_s": first.ttft_s,
                "second_ttft_s": median(seconds),
                "second_samples_s": seconds,
                "cold_question_s": median(cold),
                "extra_s": median(extra),
                "times_sooner": first.ttft_s / median(seconds),
                "cached_tokens": min(cached),
            }
            floor = prefill_floor(engine.loaded.spec, k, start=len(document))
            rows.append(Row(job.model, length, figures, median(seconds), floor))
    return Result(rows)


def _second_question(engine: Any, prompts: Prompts, document: list[int], k: int, salt: str) -> Any:
    """A question behind the document, all of which must come from the cache."""
    sample = run_request(engine, [*document, *prompts.fresh(k)], 1, salt=salt)
    if sample.cached_tokens < len(document):
        raise EngineError(
            f"a second question found {sample.cached_tokens} of the {len(document)} tokens of its document in the "
            "cache: the run is void"
        )
    return sample


BENCH = Bench(
    "prefix",
    "a second question on a document that was read before",
    run,
    (
        Column("question_tokens", "question", "d"),
        Column("first_ttft_s", "first TTFT s", ".3f"),
        Column("second_ttft_s", "second TTFT s", ".3f"),
        Column("cold_question_s", "question alone s", ".3f"),
        Column("extra_s", "extra ms", ".1f", 1e3),
        Column("times_sooner", "times sooner", ".1f"),
        Column("cached_tokens", "cached", "d"),
        Column("limit", "floor s", ".3f"),
        Column("times_floor", "x floor"),
    ),
)
