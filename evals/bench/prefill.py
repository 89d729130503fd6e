"""Time to the first token of a cold prompt, by length, and what the run added to memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longctx.evals.bench.fit import fit_curve
from longctx.evals.bench.floors import pair_flops, prefill_floor
from longctx.evals.bench.job import Bench, Column, Job, Result, Row
from longctx.evals.bench.limits import Limits
from longctx.evals.bench.memory import GrowthWatch, planned_growth_bytes
from longctx.evals.bench.peers import Peer, is_url, open_peer
from longctx.evals.bench.profile import StepProfile
from longctx.evals.bench.runs import Prompts, Sample, lengths_for, median, open_engine, run_cold, warm_up
from longctx.models.spec import ModelSpec

DEFAULT_LENGTHS = (1024, 8192, 32768)


def run(job: Job) -> Result:
    """Each length `repeats` times, ours and the peer's in turn; a length is the prompt and one generated token."""
    with open_engine(job) as (llm, engine):
        spec = engine.loaded.spec
        prompts = Prompts(engine.loaded.vocab_limit, new=is_url(job.against))
        lengths = lengths_for(job, DEFAULT_LENGTHS, engine.partition.longest_request, least=2)
        warm_up(engine, prompts)
        # Beside a peer's caches or a profiler's events the process's growth would not be ours.
        watch = GrowthWatch(engine) if job.against is None and not job.profile else None
        peer = open_peer(job.against, engine)
        rows = []
        for length in lengths:
            samples, peer_s, agreeing = _measure(job, engine, prompts, length, peer)
            ttft_s = median([s.ttft_s for s in samples])
            figures: dict[str, Any] = {
                "ttft_s": ttft_s,
                "ttft_samples_s": [s.ttft_s for s in samples],
                "prefill_tokens_per_s": (length - 1) / ttft_s,
                "cached_tokens": max(s.cached_tokens for s in samples),
                "num_chunks": samples[-1].prefill_steps,
            }
            if watch is not None:
                figures |= _memory(watch, llm.plan(length - 1, max_tokens=1))
            if peer is not None:
                figures |= _beside(peer_s, [s.ttft_s for s in samples], agreeing)
            if job.profile:
                figures["profile"] = _profile(engine, prompts, length)
            rows.append(Row(job.model, length, figures, ttft_s, prefill_floor(spec, length - 1)))
    return Result(rows, _curve(spec, rows))


def _measure(
    job: Job, engine: Any, prompts: Prompts, length: int, peer: Peer | None
) -> tuple[list[Sample], list[float], int | None]:
    samples: list[Sample] = []
    peer_s: list[float] = []
    agreeing: int | None = 0
    for repeat in range(job.repeats):
        job.say(f"prefill of {length:,} tokens, {repeat + 1} of {job.repeats}")
        ids = prompts.fresh(length - 1)
        # Whoever comes second finds a warmer or a hotter machine: take turns.
        theirs = peer.prefill(ids) if peer is not None and repeat % 2 else None
        samples.append(run_cold(engine, ids, 1, prompts.fresh_salt()))
        if peer is not None:
            theirs = theirs or peer.prefill(ids)
            peer_s.append(theirs.ttft_s)
            if theirs.token is None or agreeing is None:
                agreeing = None  # a server does not name its tokens
            else:
                agreeing += theirs.token == samples[-1].token_ids[0]
            del theirs
    return samples, peer_s, agreeing


def _beside(peer_s: Sequence[float], ours_s: Sequence[float], agreeing: int | None) -> dict[str, Any]:
    return {
        "peer_ttft_s": median(peer_s),
        "peer_ttft_samples_s": list(peer_s),
        "peer_over_ours": median([theirs / ours for theirs, ours in zip(peer_s, ours_s, strict=True)]),
        "peer_same_first_tokens": agreeing,
    }


def _memory(watch: GrowthWatch, plan: Any) -> dict[str, Any]:
    """Growth since the weights were loaded; earlier, shorter lengths stay in the pool, so only the longest compares."""
    growth, planned = watch.growth_bytes(), planned_growth_bytes(plan)
    return {
        "rss_growth_bytes": growth,
        "planned_growth_bytes": planned,
        "growth_of_plan": None if growth is None else growth / planned,
        "pool_bytes": plan.pool_bytes,
    }


def _profile(engine: Any, prompts: Prompts, length: int) -> dict[str, Any]:
    """The mean chunk of one more prefill."""
    with StepProfile(engine, lambda request: True) as taken:
        run_cold(engine, prompts.fresh(length - 1), 1, prompts.fresh_salt(), step=taken.step)
    return taken.to_json()


def _curve(spec: ModelSpec, rows: Sequence[Row]) -> Any:
    """a + b n + c n^2 over the lengths, c beside what the full-attention layers alone need."""
    curve = fit_curve([r.tokens or 0 for r in rows], [r.measured_s or 0.0 for r in rows], 2)
    quadratic = sum(pair_flops(layer) for layer in spec.layers if layer.reach.most is None) / 2

    def summary(limits: Limits) -> Mapping[str, Any]:
        if curve is None:
            return {}
        return {"fit": {**curve, "c_floor": quadratic / limits.flops}}

    return summary


BENCH = Bench(
    "prefill",
    "cold time to the first token by length",
    run,
    (
        Column("ttft_s", "TTFT s", ".3f"),
        Column("limit", "floor s", ".3f"),
        Column("times_floor", "x floor"),
        Column("prefill_tokens_per_s", "tok/s", ",.0f"),
        Column("num_chunks", "chunks", "d"),
        Column("cached_tokens", "cached", "d"),
        Column("peer_ttft_s", "peer TTFT s", ".3f"),
        Column("peer_over_ours", "peer / ours"),
        Column("rss_growth_bytes", "RSS growth MB", ",.0f", 1e-6),
        Column("planned_growth_bytes", "planned MB", ",.0f", 1e-6),
    ),
    against=("hf", "URL"),
)
