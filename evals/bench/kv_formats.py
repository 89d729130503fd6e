"""How fast one decoded token's attention reads a long context in each KV format, the formats in turn."""

# Shape legend: n tokens of context, K kv heads, B block tokens, D head dim.
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longctx.attention.backend import Backend
from longctx.attention.span import AttnParams, DecodeBatch
from longctx.evals.bench.floors import Floor, attention_bytes
from longctx.evals.bench.job import Bench, Column, Job, Result, Row
from longctx.evals.bench.limits import Limits
from longctx.evals.bench.runs import lengths_for, median, open_engine
from longctx.models.spec import LayerSpec, ModelSpec
from longctx.quant.formats import FORMATS, KVFormat
from longctx.quant.layout import BlockLayout, LayerKV
from longctx.quant.store import store_tokens

DEFAULT_LENGTHS = (1024, 8192, 32768)
BASE = "fp32"
ROUNDS = 8
"""Rounds of each repeat: a round decodes one token's attention in every format, so that each meets the same machine."""

BLOCK_TOKENS = 256


@dataclass(frozen=True)
class _Stored:
    """Random keys and values of one layer in one format, and the one query that reads them."""

    layer: LayerKV
    batch: DecodeBatch
    params: AttnParams
    query: torch.Tensor


def run(job: Job) -> Result:
    """Pools of random vectors for every layer of the model, no forward: what differs is the format alone."""
    rows = []
    with open_engine(job) as (_, engine):
        spec, backends = engine.loaded.spec, engine.runner.backends
        backend, device = backends.decode or backends.prefill, engine.runner.storage.device
        for length in lengths_for(job, DEFAULT_LENGTHS, engine.partition.longest_request, least=1):
            names = _formats(job)
            job.say(f"filling pools of {length:,} tokens in {', '.join(names)}")
            pools = {name: [_fill(x, length, FORMATS[name], device) for x in spec.layers] for name in names}
            rows += _measure(job, spec, backend, length, pools)
    return Result(rows)


def _formats(job: Job) -> list[str]:
    """Those named by the job's KV format, which may be a policy, beside the base; all of them where it says "auto"."""
    policy = str(job.options.get("kv_format", "auto"))
    named = [name for name in FORMATS if name in policy]
    return [name for name in FORMATS if not named or name in named or name == BASE]


def _fill(spec: LayerSpec, length: int, fmt: KVFormat, device: torch.device) -> _Stored:
    """Positions that the last token does not see lie in the null block and take no memory."""
    first = spec.reach.first(length - 1) // BLOCK_TOKENS
    sinks = -(-spec.sinks // BLOCK_TOKENS) if spec.window is not None else 0
    blocks = -(-length // BLOCK_TOKENS)
    table = np.zeros(blocks, np.int64)
    seen = np.flatnonzero((np.arange(blocks) >= first) | (np.arange(blocks) < sinks))
    table[seen] = np.random.default_rng(0).permutation(len(seen)) + 1
    layout = BlockLayout(1, spec.num_kv_heads, BLOCK_TOKENS, spec.k_dim, spec.v_dim, fmt, fmt)
    pool = torch.zeros(layout.block_bytes * (len(seen) + 1), dtype=torch.uint8, device=device)
    layer, rows = layout.layer_view(pool, 0), np.arange(BLOCK_TOKENS)
    generator = torch.Generator().manual_seed(spec.index)
    for slot in table[seen]:
        k_KTD, v_KTD = (
            torch.randn(spec.num_kv_heads, BLOCK_TOKENS, dim, generator=generator).to(device)
            for dim in (spec.k_dim, spec.v_dim)
        )
        store_tokens(layer, np.full(BLOCK_TOKENS, slot), rows, k_KTD, v_KTD)
    query = torch.randn(1, spec.num_heads, spec.k_dim, generator=generator).to(device)
    params = AttnParams(spec.scale, spec.window, spec.softcap, spec.sinks, spec.local_chunk)
    return _Stored(layer, DecodeBatch(table[None], np.array([length - 1])), params, query)


def _measure(job: Job, spec: ModelSpec, backend: Backend, length: int, pools: Mapping[str, list[_Stored]]) -> list[Row]:
    seconds: dict[str, list[float]] = {name: [] for name in pools}
    for name, layers in pools.items():
        _decode(backend, layers)  # compiles
        job.say(f"{name} is ready")
    for repeat in range(job.repeats):
        job.say(f"decoding behind {length:,} tokens, {repeat + 1} of {job.repeats}")
        for _ in range(ROUNDS):
            for name, layers in pools.items():
                seconds[name].append(_decode(backend, layers))
    return [_row(job, spec, length, FORMATS[name], seconds[name], seconds[BASE]) for name in pools]


def _decode(backend: Backend, layers: list[_Stored]) -> float:
    began = time.perf_counter()
    for x in layers:
        state = backend.decode_state(x.query, x.layer, x.batch, x.params)
    if state.out.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _row(job: Job, spec: ModelSpec, length: int, fmt: KVFormat, seconds: list[float], base: list[float]) -> Row:
    stored = {
        x.index: x.num_kv_heads * sum(fmt.data_bytes(dim) + fmt.scale_bytes(dim) for dim in (x.k_dim, x.v_dim))
        for x in spec.layers
    }
    read = attention_bytes(spec, length, stored)
    attention_s = median(seconds)
    figures: dict[str, Any] = {
        "kv_format": fmt.name,
        "attention_s": attention_s,
        "best_attention_s": min(seconds),
        "attention_samples_s": seconds,
        "attention_tokens_per_s": 1 / attention_s,
        "bytes_read": read,
        "times_fp32": statistics.median([ours / theirs for ours, theirs in zip(base, seconds, strict=True)]),
        "best_times_fp32": min(base) / min(seconds),
    }
    return Row(job.model, length, figures, attention_s, Floor(bytes_read=read), _speed(read, attention_s))


def _speed(read: float, seconds: float) -> Callable[[Limits], Mapping[str, Any]]:
    return lambda limits: {"attention_bytes_per_s": read / seconds}


BENCH = Bench(
    "kv-formats",
    "attention of a decoded token by KV format",
    run,
    (
        Column("kv_format", "format", ""),
        Column("attention_s", "attention ms", ".2f", 1e3),
        Column("limit", "floor ms", ".2f", 1e3),
        Column("times_floor", "x floor"),
        Column("attention_bytes_per_s", "GB/s", ".1f", 1e-9),
        Column("attention_tokens_per_s", "tok/s", ".1f"),
        Column("times_fp32", "x fp32"),
        Column("best_times_fp32", "best x fp32"),
    ),
)
