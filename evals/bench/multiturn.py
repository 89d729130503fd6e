"""A conversation that grows: what each turn computes and waits, beside reading everything again."""

from __future__ import annotations

from longctx.errors import EngineError
from longctx.evals.bench.floors import prefill_floor
from longctx.evals.bench.job import Bench, Column, Job, Result, Row
from longctx.evals.bench.runs import Prompts, lengths_for, open_engine, run_cold, run_request, warm_up

DEFAULT_LENGTHS = (4096,)
DEFAULT_TURN = 512
ANSWER_TOKENS = 16


def run(job: Job) -> Result:
    """Per length: turns of `tokens` new prompt tokens and a short answer, until the conversation is that long.

    One row for each turn; every turn's prompt is also read cold, for what it would have cost without the cache.
    """
    turn_tokens = job.tokens or DEFAULT_TURN
    rows = []
    with open_engine(job, max_running=2) as (_, engine):
        prompts = Prompts(engine.loaded.vocab_limit)
        lengths = lengths_for(job, DEFAULT_LENGTHS, engine.partition.longest_request, least=turn_tokens + ANSWER_TOKENS)
        warm_up(engine, prompts)
        for length in lengths:
            history: list[int] = []
            salt, turn = prompts.fresh_salt(), 0
            while len(history) + turn_tokens + ANSWER_TOKENS <= length:
                turn += 1
                prompt = [*history, *prompts.fresh(turn_tokens)]
                job.say(f"turn {turn}: {len(prompt):,} tokens")
                warm = run_request(engine, prompt, ANSWER_TOKENS, salt=salt)
                if len(prompt) - warm.cached_tokens > turn_tokens + 1:
                    raise EngineError(
                        f"turn {turn} computed {len(prompt) - warm.cached_tokens} of {len(prompt)} tokens again "
                        f"although {len(history)} were read before: the run is void"
                    )
                cold = run_cold(engine, prompt, 1, prompts.fresh_salt())
                figures = {
                    "turn": turn,
                    "cached_tokens": warm.cached_tokens,
                    "computed_tokens": len(prompt) - warm.cached_tokens,
                    "ttft_s": warm.ttft_s,
                    "cold_ttft_s": cold.ttft_s,
                    "times_sooner": cold.ttft_s / warm.ttft_s,
                    "step_s": warm.mean_step_s,
                }
                floor = prefill_floor(engine.loaded.spec, len(prompt) - warm.cached_tokens, start=warm.cached_tokens)
                rows.append(Row(job.model, len(prompt), figures, warm.ttft_s, floor))
                history = [*prompt, *warm.token_ids]
    return Result(rows)


BENCH = Bench(
    "multiturn",
    "a growing conversation, turn by turn",
    run,
    (
        Column("turn", "turn", "d"),
        Column("cached_tokens", "cached", "d"),
        Column("computed_tokens", "computed", "d"),
        Column("ttft_s", "TTFT s", ".3f"),
        Column("cold_ttft_s", "cold TTFT s", ".3f"),
        Column("times_sooner", "times sooner", ".1f"),
        Column("step_s", "step ms", ".1f", 1e3),
        Column("times_floor", "x floor"),
    ),
)
