"""Seconds of a whole decode step, sampler included, by context, and how fast attention reads the cache meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longctx.evals.bench.fit import fit_curve
from longctx.evals.bench.floors import attention_bytes, decode_floor, stored_bytes
from longctx.evals.bench.job import Bench, Column, Job, Result, Row
from longctx.evals.bench.limits import Limits
from longctx.evals.bench.peers import Peer, is_url, open_peer
from longctx.evals.bench.probe import AttentionTimes, timed_attention
from longctx.evals.bench.profile import StepProfile
from longctx.evals.bench.runs import (
    Prompts,
    Sample,
    lengths_for,
    median,
    open_engine,
    require_cold,
    run_request,
    warm_up,
)

DEFAULT_LENGTHS = (1024, 8192, 32768)
DEFAULT_TOKENS = 64
PROFILED_STEPS = 8

Derived = Callable[[Limits], Mapping[str, Any]]


@dataclass
class _Runs:
    """One length's runs: ours with the times of attention in each, the peer's mean steps and tokens."""

    ours: list[Sample] = field(default_factory=list)
    attention: list[AttentionTimes] = field(default_factory=list)
    peer_s: list[float] = field(default_factory=list)
    peer_tokens: list[list[int]] = field(default_factory=list)


def run(job: Job) -> Result:
    """Each length's prompt is read once, then decoded behind `repeats` times, by us and the peer in turn.

    A length is prompt + first token + `tokens` decoded ones.
    """
    tokens = job.tokens or DEFAULT_TOKENS
    rows = []
    with open_engine(job) as (_, engine):
        prompts = Prompts(engine.loaded.vocab_limit, new=is_url(job.against))
        lengths = lengths_for(job, DEFAULT_LENGTHS, engine.partition.longest_request, least=tokens + 2)
        warm_up(engine, prompts)
        peer = open_peer(job.against, engine)
        for length in lengths:
            ids, salt = prompts.fresh(length - tokens - 1), prompts.fresh_salt()
            runs = _measure(job, engine, ids, salt, tokens, peer)
            figures = _figures(runs.ours)
            if peer is not None:
                figures |= _beside(runs)
            if job.profile:
                figures["profile"] = _profile(engine, ids, salt, min(tokens, PROFILED_STEPS))
            # The step that follows the first token sees the prompt and that token; each later one sees one key more.
            context = len(ids) + (tokens + 1) / 2
            floor = decode_floor(engine.loaded.spec, context, stored_bytes(engine))
            derived = _attention(engine, runs.attention, context, tokens)
            rows.append(Row(job.model, length, figures, figures["step_s"], floor, derived))
    return Result(rows, _curve(rows))


def _measure(job: Job, engine: Any, ids: Sequence[int], salt: str, tokens: int, peer: Peer | None) -> _Runs:
    runs = _Runs()
    job.say(f"reading {len(ids):,} tokens")
    require_cold(run_request(engine, ids, 1, salt=salt), len(ids))
    theirs = None if peer is None else peer.prefill(ids)

    def ours() -> None:
        with timed_attention(engine) as times:
            runs.ours.append(run_request(engine, ids, tokens + 1, salt=salt))
        runs.attention.append(times)

    def peers() -> None:
        if peer is not None and theirs is not None:
            seconds, chosen = peer.decode(theirs, tokens)
            runs.peer_s.append(statistics.fmean(seconds))
            if chosen is not None:
                runs.peer_tokens.append([theirs.token, *chosen])

    for repeat in range(job.repeats):
        job.say(f"decoding {tokens} tokens behind {len(ids):,}, {repeat + 1} of {job.repeats}")
        # Whoever comes second finds a warmer or a hotter machine: take turns.
        for go in (ours, peers) if repeat % 2 == 0 else (peers, ours):
            go()
    return runs


def _figures(samples: Sequence[Sample]) -> dict[str, Any]:
    means = [s.mean_step_s for s in samples]
    step_s = median(means)
    return {
        "step_s": step_s,
        "step_samples_s": means,
        "median_step_s": median([s for sample in samples for s in sample.step_s]),
        "decode_tokens_per_s": 1 / step_s,
        "steps": len(samples[0].step_s),
    }


def _beside(runs: _Runs) -> dict[str, Any]:
    ratios = [theirs / ours.mean_step_s for theirs, ours in zip(runs.peer_s, runs.ours, strict=True)]
    figures: dict[str, Any] = {
        "peer_step_s": median(runs.peer_s),
        "peer_step_samples_s": runs.peer_s,
        "peer_over_ours": median(ratios),
    }
    if runs.peer_tokens:
        pairs = zip(runs.peer_tokens[0], runs.ours[0].token_ids, strict=True)
        figures["peer_same_tokens"] = statistics.fmean(a == b for a, b in pairs)
    return figures


def _profile(engine: Any, ids: Sequence[int], salt: str, steps: int) -> dict[str, Any]:
    with StepProfile(engine, lambda request: request.num_output_tokens > 0) as taken:
        run_request(engine, ids, steps + 1, salt=salt, step=taken.step)
    return taken.to_json()


def _attention(engine: Any, attention: Sequence[AttentionTimes], context: float, tokens: int) -> Derived:
    """Seconds in attention per step, and the bytes per second of the layers that read the whole context."""
    spec, stored = engine.loaded.spec, stored_bytes(engine)
    all_s = median([sum(times.decode_s.values()) / tokens for times in attention])
    # Layers with a window read a constant; they stand for the whole only in a model that has no others.
    full = {layer.index: stored[layer.index] for layer in spec.layers if layer.reach.most is None} or stored
    reaches = {layer.reach for layer in spec.layers if layer.index in full}
    full_s = median([sum(times.decode_s.get(reach, 0.0) for reach in reaches) / tokens for times in attention])
    read = attention_bytes(spec, context, {**dict.fromkeys(stored, 0), **full})

    def derived(limits: Limits) -> Mapping[str, Any]:
        speed = read / full_s if full_s else None
        return {
            "attention_s": all_s,
            "attention_bytes_per_s": speed,
            "attention_share_of_read": None if speed is None else speed / limits.read_bytes_per_s,
        }

    return derived


def _curve(rows: Sequence[Row]) -> Derived:
    """a + b n over the contexts, b beside what reading one more token's keys and values takes."""
    curve = fit_curve([r.tokens or 0 for r in rows], [r.measured_s or 0.0 for r in rows], 1)
    return lambda limits: {} if curve is None else {"fit": curve}


BENCH = Bench(
    "decode",
    "seconds of a whole decode step by context",
    run,
    (
        Column("step_s", "step ms", ".2f", 1e3),
        Column("limit", "floor ms", ".2f", 1e3),
        Column("times_floor", "x floor"),
        Column("decode_tokens_per_s", "tok/s", ".1f"),
        Column("attention_s", "attention ms", ".2f", 1e3),
        Column("attention_bytes_per_s", "its GB/s", ".1f", 1e-9),
        Column("attention_share_of_read", "of read", ".0%"),
        Column("peer_step_s", "peer step ms", ".2f", 1e3),
        Column("peer_over_ours", "peer / ours"),
        Column("peer_same_tokens", "same tokens", ".0%"),
    ),
    against=("hf", "URL"),
)
