"""The plan: whether a context fits, what it takes to the byte, and the smallest change that makes it fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from longctx.kv.groups import LayerGroup, formats_text
from longctx.kv.memory import Fixed
from longctx.kv.partition import Partition, PoolShape, admit, ceil_div, partition
from longctx.kv.sizes import request_bytes, tokens_that_fit, vector_bytes
from longctx.kv.verdict import Demand, Room, TierSpec, remedy_for, too_long, verdict_of
from longctx.rates import Rates, break_even_speed, choose
from longctx.units import format_bytes

__all__ = ["DEFAULT_CHUNK_TOKENS", "Demand", "Partition", "Plan", "PoolShape", "TierSpec", "admit", "partition", "plan"]

DEFAULT_CHUNK_TOKENS = 2048


@dataclass(frozen=True)
class Plan:
    """One plan; every field is a key of its JSON. Bytes and seconds are plain numbers.

    `verdict` is fits, spills, needs_quantization or refused, the first that is true. `bytes_per_token` is the marginal
    cost of one more token, without scales and without windows. `kv_bytes` are all requests' keys and values, windows
    included, scales apart. `pool_bytes` is what the allocator takes, `needed_bytes` the smallest pool for this demand,
    `kv_limit_bytes` the most a pool may take. `tokens_that_fit` is the longest request at this concurrency by bytes
    alone (null: no limit); `pool_tokens` the same after scales, whole blocks, null block and windows.
    `requests_that_fit` are requests of this length that run at the same time. `seconds` is the range of one request's
    cold prefill. `attention_variant` is "exact", or what is lost. `fits_with` has each change that alone would make it
    fit.
    """

    verdict: str
    remedy: str | None
    tokens: int
    concurrency: int
    max_positions: int | None
    attention_variant: str
    kv_format: str
    bytes_per_token: int
    scale_bytes_per_token: int
    kv_bytes: int
    scale_bytes: int
    weight_bytes: int
    workspace_bytes: int
    process_bytes: int
    pool_bytes: int
    peak_bytes: int
    needed_bytes: int
    min_kv_bytes: int
    kv_limit_bytes: int
    tokens_that_fit: int | None
    pool_tokens: int
    requests_that_fit: int
    chunk_tokens: int
    num_chunks: int
    last_chunk_tokens: int
    tiers: dict[str, dict[str, float | int | str | None]]
    seconds: dict[str, float] | None
    fits_with: dict[str, int | str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        text = (
            f"{self.verdict}: {self.concurrency} x {self.tokens:,} tokens, KV {format_bytes(self.kv_bytes)}, pool "
            f"{format_bytes(self.pool_bytes)}, peak {format_bytes(self.peak_bytes)}"
        )
        if self.seconds is not None:
            text += f", prefill {self.seconds['low']:.1f} to {self.seconds['high']:.1f} s"
        return text if self.remedy is None else f"{text}; {self.remedy}"


def plan(
    demand: Demand,
    groups: Sequence[LayerGroup],
    kv_limit: int,
    *,
    kv_memory: int | None = None,
    fixed: Fixed | None = None,
    chunk_tokens: int | None = None,
    max_chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    max_positions: int | None = None,
    tiers: Sequence[TierSpec] = (),
    engine_pool: Partition | None = None,
    rates: Rates | None = None,
    attention_variant: str = "exact",
) -> Plan:
    """Plan `demand` where a pool may take up to `kv_limit` bytes and takes `kv_memory` of them (all, if None).

    `engine_pool` is the pool of a running engine; without it one is cut for this demand: its concurrency running, at
    its length. `chunk_tokens` fixes the steps; None cuts them by `rates` (2 s at most) and at `max_chunk_tokens`.
    `max_positions` is the model's limit, None for a bare geometry. Without `rates` there are no seconds. `groups` are
    those of a model under `attention_variant`.
    """
    fixed = fixed or Fixed()
    max_chunk = chunk_tokens or (engine_pool.shape.max_chunk_tokens if engine_pool else max_chunk_tokens)
    room = Room(tuple(groups), max_chunk, kv_limit, engine_pool)
    pool_bytes = _pool_bytes(room, demand, kv_limit if kv_memory is None else kv_memory)
    data, scales = (demand.concurrency * part for part in request_bytes(groups, demand.tokens))
    marginal = [vector_bytes(group) for group in groups if group.is_full]
    verdict, fits_with = verdict_of(demand, room, max_positions, tiers)
    served = verdict in ("fits", "spills")
    by_bytes = tokens_that_fit(groups, kv_limit, demand.concurrency)
    num_chunks, last_chunk = _chunks(demand.tokens, max_chunk, rates if chunk_tokens is None else None)
    usual_chunk = ceil_div(demand.tokens, num_chunks)
    seconds = None if rates is None else rates.prefill_seconds(demand.tokens, chunk_tokens=usual_chunk)
    most_tokens = max(demand.tokens, max_positions or 0) if by_bytes is None else by_bytes
    return Plan(
        verdict=verdict,
        remedy=remedy_for(verdict, demand, room, fits_with, max_positions, fixed),
        tokens=demand.tokens,
        concurrency=demand.concurrency,
        max_positions=max_positions,
        attention_variant=attention_variant,
        kv_format=formats_text(groups),
        bytes_per_token=sum(data_bytes for data_bytes, _ in marginal),
        scale_bytes_per_token=sum(scale_bytes for _, scale_bytes in marginal),
        kv_bytes=data,
        scale_bytes=scales,
        weight_bytes=fixed.weight_bytes,
        workspace_bytes=fixed.workspace_bytes,
        process_bytes=fixed.process_bytes,
        pool_bytes=pool_bytes,
        peak_bytes=max(fixed.load_peak, fixed.total + (pool_bytes if served else max(pool_bytes, room.needs(demand)))),
        needed_bytes=room.needs(demand),
        min_kv_bytes=room.shape(demand).min_kv_bytes,
        kv_limit_bytes=kv_limit,
        tokens_that_fit=by_bytes,
        pool_tokens=room.longest(demand.concurrency, most_tokens),
        requests_that_fit=0 if too_long(demand, max_positions) else room.most_requests(demand.tokens),
        chunk_tokens=max_chunk,
        num_chunks=num_chunks,
        last_chunk_tokens=last_chunk,
        tiers=_tier_rows(tiers, demand, data + scales, pool_bytes, verdict, seconds),
        seconds=None if seconds is None else {"low": seconds[0], "high": seconds[1]},
        fits_with=fits_with,
    )


def _pool_bytes(room: Room, demand: Demand, kv_memory: int) -> int:
    """What the allocator takes; 0 where it would refuse to start."""
    if room.engine_pool is not None:
        return room.engine_pool.pool_bytes
    shape = room.shape(demand)
    return Partition.within(shape, kv_memory).pool_bytes if shape.min_kv_bytes <= kv_memory else 0


def _chunks(tokens: int, max_chunk: int, rates: Rates | None) -> tuple[int, int]:
    """(number of steps, tokens of the last)."""
    if rates is not None:
        return rates.chunks(tokens, max_chunk)
    num_chunks = ceil_div(tokens, max_chunk)
    return num_chunks, tokens - (num_chunks - 1) * max_chunk


def _tier_rows(
    tiers: Sequence[TierSpec],
    demand: Demand,
    total_bytes: int,
    pool_bytes: int,
    verdict: str,
    seconds: tuple[float, float] | None,
) -> dict[str, dict[str, float | int | str | None]]:
    """Per tier: what of this cache it holds (lower tiers hold copies), the time to read the whole cache from it, and
    the prefill speed at which computing it again takes as long."""
    if "g1" not in {tier.name for tier in tiers}:
        tiers = (TierSpec("g1"), *tiers)
    tokens = demand.tokens * demand.concurrency
    rows: dict[str, dict[str, float | int | str | None]] = {}
    for tier in tiers:
        held = total_bytes if tier.capacity_bytes is None else min(total_bytes, tier.capacity_bytes)
        if tier.name == "g1" and verdict == "spills":
            held = min(held, pool_bytes)
        load_s = None if tier.bytes_per_s is None else total_bytes / tier.bytes_per_s
        row: dict[str, float | int | str | None] = {
            "bytes": held,
            "load_ms": (0.0 if tier.name == "g1" else None) if load_s is None else load_s * 1e3,
        }
        if load_s:
            row["break_even_tokens_per_s"] = break_even_speed(tokens, load_s)
            if seconds is not None:
                row["choice"] = choose(load_s, demand.concurrency * sum(seconds) / 2)
        rows[tier.name] = row
    return rows
