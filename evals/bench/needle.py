"""The constructed needle model at any length: every needle must be found, and the curves of its time."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from longctx.evals.bench.fit import fit_curve
from longctx.evals.bench.floors import decode_floor, prefill_floor, stored_bytes
from longctx.evals.bench.job import Bench, Column, Job, Result, Row
from longctx.evals.bench.runs import Prompts, lengths_for, open_engine, run_cold, run_request, warm_up
from longctx.evals.needle_model import NeedleModel

DEFAULT_LENGTHS = (4096, 32768, 65536, 131072)
DEFAULT_TOKENS = 16
NUM_NEEDLES = 11
"""Depths 0, 0.1 ... 1."""


def run(job: Job) -> Result:
    """Per length one haystack with eleven needles, read once; then each needle is asked for, and a decode is timed.

    A length is haystack + question + first token + `tokens` decoded ones. The prefill is timed once: its curve over the
    lengths says more than repeats of the longest.
    """
    tokens = job.tokens or DEFAULT_TOKENS
    needles = NeedleModel()
    rows: list[Row] = []
    wrong: list[str] = []
    longest = max(job.lengths or DEFAULT_LENGTHS)
    with tempfile.TemporaryDirectory(prefix="longctx-needle-") as folder:
        needles.save(folder)
        job = replace(job, model=folder)
        with open_engine(job, max_model_len=longest) as (_, engine):
            least = NUM_NEEDLES + 2 + tokens + 1
            lengths = lengths_for(job, DEFAULT_LENGTHS, engine.partition.longest_request, least)
            prompts = Prompts(engine.loaded.vocab_limit)
            warm_up(engine, prompts)
            for seed, length in enumerate(lengths):
                row, missed = _measure(job, engine, needles, length, tokens, seed, prompts.fresh_salt())
                rows.append(row)
                wrong += [f"depth {depth:.2f} at {length:,} tokens" for depth in missed]
    failure = f"the needle model missed {len(wrong)} needles: {', '.join(wrong)}" if wrong else None
    return Result(rows, lambda limits: _curves(rows), failure)


def _measure(
    job: Job, engine: Any, needles: NeedleModel, length: int, tokens: int, seed: int, salt: str
) -> tuple[Row, list[float]]:
    depths = {key: float(depth) for key, depth in enumerate(np.linspace(0.0, 1.0, NUM_NEEDLES))}
    haystack = needles.make_prompt(length - tokens - 2, depths, seed)
    job.say(f"{NUM_NEEDLES} needles in {length:,} tokens")
    cells, missed = [], []
    first = None
    for key, depth in depths.items():
        ids = [*haystack, *needles.query_ids(key)]
        sample = run_cold(engine, ids, 1, salt) if first is None else run_request(engine, ids, 1, salt=salt)
        first = first or sample
        found = sample.token_ids[0] == needles.answer(ids)
        cells.append({"length": length, "depth": depth, "score": float(found), "cached_tokens": sample.cached_tokens})
        if not found:
            missed.append(depth)
    assert first is not None
    decoded = run_request(engine, ids, tokens + 1, salt=salt)
    spec = engine.loaded.spec
    context = len(ids) + (tokens + 1) / 2
    figures = {
        "score": float(np.mean([cell["score"] for cell in cells])),
        "cells": cells,
        "ttft_s": first.ttft_s,
        "cached_tokens": first.cached_tokens,
        "step_s": decoded.mean_step_s,
        "decode_floor_bytes": decode_floor(spec, context, stored_bytes(engine)).bytes_read,
    }
    return Row("needle", length, figures, first.ttft_s, prefill_floor(spec, len(ids))), missed


def _curves(rows: Sequence[Row]) -> dict[str, Any]:
    lengths = [row.tokens or 0 for row in rows]
    curves = {
        "prefill_fit": fit_curve(lengths, [row.figures["ttft_s"] for row in rows], 2),
        "decode_fit": fit_curve(lengths, [row.figures["step_s"] for row in rows], 1),
    }
    return {name: curve for name, curve in curves.items() if curve is not None}


BENCH = Bench(
    "needle",
    "the constructed needle model: every needle found, at any length; takes no MODEL",
    run,
    (
        Column("score", "found", ".0%"),
        Column("ttft_s", "TTFT s", ".3f"),
        Column("limit", "floor s", ".3f"),
        Column("times_floor", "x floor"),
        Column("step_s", "step ms", ".2f", 1e3),
        Column("cached_tokens", "cached", "d"),
    ),
    needs_model=False,
)
