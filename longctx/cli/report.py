"""What `run` says of a job: the plan before, the usage after, the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longctx.events import FinishEvent, TokenLogprobs
from longctx.resident import peak_rss_bytes
from longctx.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from longctx.llm import LLM


@dataclass(frozen=True)
class Answer:
    """One finished question; `question` is None when the prompt was asked alone."""

    question: str | None
    seed: int
    end: FinishEvent
    logprobs: tuple[tuple[int, TokenLogprobs], ...] | None = None
    """Each generated token's id and logprobs, if they were asked for."""


def plan_line(llm: LLM, num_prompt_tokens: int, max_tokens: int) -> str:
    """What the longest request takes, by the numbers admission uses."""
    plan = llm.plan(num_prompt_tokens, max_tokens=max_tokens)
    parts = [
        f"plan: {plan.verdict}",
        f"{num_prompt_tokens:,} prompt + {max_tokens:,} answer tokens",
        f"KV {format_bytes(plan.kv_bytes + plan.scale_bytes)} of a pool of {format_bytes(plan.pool_bytes)}",
        f"peak {format_bytes(plan.peak_bytes)}",
    ]
    if plan.seconds is not None:
        low, high = format_seconds(plan.seconds["low"]), format_seconds(plan.seconds["high"])
        parts.append(f"reading takes {low} to {high}")
    variant = llm.engine.config.variant
    if variant.reach is not None:
        parts.append(f"attention {variant}")
    return ", ".join(parts)


def usage_line(end: FinishEvent) -> str:
    """How it went, in one line for a person."""
    usage, timings = end.usage, end.timings
    parts = [f"{usage.prompt_tokens:,} prompt tokens, {usage.cached_tokens:,} of them cached"]
    if usage.completion_tokens:
        ending = {"length": ", ended by --max-tokens", "cancelled": ", interrupted"}.get(end.reason, "")
        parts.append(f"first token after {format_seconds(timings.ttft_ms / 1e3)}")
        parts.append(f"{usage.completion_tokens:,} generated{ending}")
    elif end.reason == "cancelled":
        parts.append(f"interrupted after {end.computed_tokens:,} computed")
    for name, rate in (("prefill", timings.prefill_tokens_per_s), ("decode", timings.decode_tokens_per_s)):
        if rate > 0 and usage.completion_tokens:
            parts.append(f"{name} {rate:,.1f} tokens/s")
    if (peak := peak_rss_bytes()) is not None:
        parts.append(f"peak memory {format_bytes(peak)}")
    return "; ".join(parts)


def json_report(llm: LLM, answers: Sequence[Answer]) -> dict[str, Any]:
    """The first answer's figures at the top; with several questions all of them under `answers`."""
    report = _answer_report(llm, answers[0])
    engine = llm.engine
    report["ranks"] = [{"weight_bytes": engine.loaded.spec.weight_bytes, "kv_bytes": engine.partition.pool_bytes}]
    if answers[0].question is not None:
        report["answers"] = [{"question": a.question, **_answer_report(llm, a)} for a in answers]
    return report


def _answer_report(llm: LLM, item: Answer) -> dict[str, Any]:
    end = item.end
    usage, timings = end.usage, end.timings
    by_tier = {name: usage.by_tier.get(name, 0) for name in ("g1", "g2", "g3", "g4")}
    logprobs = {} if item.logprobs is None else {"logprobs": _logprobs_report(llm, item.logprobs)}
    return {
        "text": end.text,
        **logprobs,
        "finish_reason": end.reason,
        "seed": item.seed,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "by_tier": by_tier},
        },
        "timings": {
            "queue_ms": timings.queue_ms,
            "ttft_ms": timings.ttft_ms if usage.completion_tokens else None,
            "prefill_tokens_per_s": timings.prefill_tokens_per_s,
            "decode_tokens_per_s": timings.decode_tokens_per_s,
            "peak_rss_bytes": peak_rss_bytes(),
        },
        "computed_tokens": end.computed_tokens,
    }


def _logprobs_report(llm: LLM, logprobs: Sequence[tuple[int, TokenLogprobs]]) -> list[dict[str, Any]]:
    """Token by token as the server's chat answers have them."""
    from longctx.server.logprobs import TokenSpeller, chat_entry

    speller = TokenSpeller(llm.tokenizer)
    return [chat_entry(speller.take(token_id, row)) for token_id, row in logprobs]
