"""The machine's limits by themselves, and with a model the floors that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from longctx.evals.bench.floors import decode_floor, prefill_floor, stored_bytes
from longctx.evals.bench.job import Bench, Column, Job, Result, Row
from longctx.evals.bench.limits import FLOPS_PARTS, READ_PARTS, Limits
from longctx.evals.bench.runs import lengths_for, open_engine
from longctx.models.spec import ModelSpec

DEFAULT_LENGTHS = (1024, 4096, 8192, 16384, 32768)


def run(job: Job) -> Result:
    """Nothing is timed here but what stands under `machine` anyway: a row for each loop, then a model's floors."""
    rows = [Row(None, None, {"figure": name}, derived=_part(name, "flops")) for name in FLOPS_PARTS]
    rows += [Row(None, None, {"figure": name}, derived=_part(name, "read_bytes_per_s")) for name in READ_PARTS]
    if job.model is not None:
        with open_engine(job) as (_, engine):
            lengths = lengths_for(job, DEFAULT_LENGTHS, engine.partition.longest_request, least=1)
            rows += [_floors(job.model, engine.loaded.spec, n, stored_bytes(engine)) for n in lengths]
    return Result(rows)


def _part(name: str, limit: str) -> Callable[[Limits], Mapping[str, Any]]:
    def derived(limits: Limits) -> Mapping[str, Any]:
        value, best = limits.parts[name], getattr(limits, limit)
        return {"value": value, "limit": best, "share_of_limit": value / best}

    return derived


def _floors(model: str, spec: ModelSpec, n: int, stored: Mapping[int, int]) -> Row:
    prefill, decode = prefill_floor(spec, n), decode_floor(spec, n, stored)

    def derived(limits: Limits) -> Mapping[str, Any]:
        seconds = decode.seconds(limits)
        return {"decode_floor_s": seconds, "decode_floor_tokens_per_s": 1 / seconds}

    figures = {"figure": "floors", "prefill_flops": prefill.flops, "decode_bytes": decode.bytes_read}
    return Row(model, n, figures, floor=prefill, derived=derived)


BENCH = Bench(
    "limits",
    "FMA peak and read bandwidth of this machine; with a MODEL its floors",
    run,
    (
        Column("figure", "", "s"),
        Column("value", "G/s", ".1f", 1e-9),
        Column("share_of_limit", "of limit", ".0%"),
        Column("prefill_flops", "prefill GFLOP", ",.0f", 1e-9),
        Column("decode_bytes", "decode MB", ",.0f", 1e-6),
        Column("decode_floor_s", "decode floor ms", ".1f", 1e3),
        Column("decode_floor_tokens_per_s", "tok/s", ".1f"),
    ),
    needs_model=False,
)
