"""Every benchmark by name. A new one is one file with a `BENCH`, and one line here."""

from __future__ import annotations

from longctx.evals.bench import (
    concurrency,
    decode,
    kv_formats,
    machine_limits,
    mixed,
    multiturn,
    needle,
    prefill,
    prefix,
    replay,
    serve,
)
from longctx.evals.bench.job import Bench

BENCHES: dict[str, Bench] = {
    module.BENCH.name: module.BENCH
    for module in (
        *(machine_limits, prefill, decode, kv_formats, prefix),
        *(mixed, multiturn, concurrency, replay, serve, needle),
    )
}
