"""Several clients at once: tokens per second of all, and what each of them waits."""

from __future__ import annotations

from longctx.evals.bench.floors import Floor, decode_floor, stored_bytes
from longctx.evals.bench.job import Bench, Column, Job, Result, Row
from longctx.evals.bench.runs import Prompts, lengths_for, open_engine, warm_up
from longctx.evals.bench.together import Arrival, Together, percentile

DEFAULT_LENGTHS = (1024,)
DEFAULT_TOKENS = 64
CLIENTS = (1, 2, 4, 8)


def run(job: Job) -> Result:
    """Per length and number of clients: all prompts arrive together, all decode `tokens` tokens.

    The floor of a step counts the weights once and every client's keys and values.
    """
    tokens = job.tokens or DEFAULT_TOKENS
    rows = []
    with open_engine(job, max_running=max(CLIENTS)) as (_, engine):
        prompts = Prompts(engine.loaded.vocab_limit)
        lengths = lengths_for(job, DEFAULT_LENGTHS, engine.partition.longest_request, least=tokens + 1)
        warm_up(engine, prompts)
        for length in lengths:
            for clients in CLIENTS:
                job.say(f"{clients} clients of {length:,} tokens")
                arrivals = [
                    Arrival(0.0, prompts.fresh(length - tokens), tokens, prompts.fresh_salt()) for _ in range(clients)
                ]
                lives = Together(engine).run(arrivals)
                first_s, last_s = max(x.token_s[0] for x in lives), max(x.token_s[-1] for x in lives)
                # Once everybody has its first token every step is a decode of all that are left.
                decoded = sum(sum(at_s > first_s for at_s in life.token_s) for life in lives)
                gaps = [gap for life in lives for gap in life.gaps_s]
                step_s = clients * (last_s - first_s) / decoded if decoded else None
                figures = {
                    "clients": clients,
                    "ttft_p50_s": percentile([x.ttft_s for x in lives], 0.5),
                    "ttft_max_s": max(x.ttft_s for x in lives),
                    "itl_p50_s": percentile(gaps, 0.5),
                    "itl_p99_s": percentile(gaps, 0.99),
                    "decode_tokens_per_s": decoded / (last_s - first_s) if decoded else None,
                    "tokens_per_s": sum(x.prompt_tokens + len(x.token_s) for x in lives) / last_s,
                }
                stored = stored_bytes(engine)
                one = decode_floor(engine.loaded.spec, length - tokens / 2, stored).bytes_read
                weights = decode_floor(engine.loaded.spec, 0, stored).bytes_read
                floor = Floor(bytes_read=weights + clients * (one - weights))
                rows.append(Row(job.model, length, figures, step_s, floor))
    return Result(rows)


BENCH = Bench(
    "concurrency",
    "throughput and latency by the number of clients",
    run,
    (
        Column("clients", "clients", "d"),
        Column("ttft_p50_s", "TTFT p50 s", ".2f"),
        Column("ttft_max_s", "max", ".2f"),
        Column("itl_p50_s", "ITL p50 ms", ".0f", 1e3),
        Column("itl_p99_s", "p99", ".0f", 1e3),
        Column("decode_tokens_per_s", "decode tok/s", ".1f"),
        Column("tokens_per_s", "all tok/s", ".0f"),
        Column("times_floor", "step x floor"),
    ),
)
