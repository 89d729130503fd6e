"""Whether a demand fits a pool, and if not, every single change that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from longctx.errors import LongctxError
from longctx.kv.groups import LayerGroup
from longctx.kv.memory import Fixed
from longctx.kv.partition import Partition, PoolShape
from longctx.kv.sizes import request_bytes, with_format
from longctx.quant.formats import FORMATS
from longctx.units import format_bytes


@dataclass(frozen=True)
class TierSpec:
    """A tier as the user described it; without a capacity it holds anything, without a speed it has no load time."""

    name: str
    bytes_per_s: float | None = None
    capacity_bytes: int | None = None


@dataclass(frozen=True)
class Demand:
    """What is asked: `concurrency` requests of `tokens` tokens (prompt + generated) each, at the same time."""

    tokens: int
    concurrency: int = 1

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.concurrency < 1:
            raise LongctxError(f"tokens {self.tokens} and concurrency {self.concurrency} must be at least 1")


@dataclass(frozen=True)
class Room:
    """A pool that exists (`engine_pool`) or may be cut for a demand out of `limit` bytes."""

    groups: tuple[LayerGroup, ...]
    chunk_tokens: int
    limit: int
    engine_pool: Partition | None = None

    def shape(self, demand: Demand) -> PoolShape:
        if self.engine_pool is not None:
            return self.engine_pool.shape
        return PoolShape(self.groups, demand.concurrency, self.chunk_tokens, demand.tokens)

    def needs(self, demand: Demand) -> int:
        shape = self.shape(demand)
        running = max(shape.max_running, demand.concurrency)
        return replace(shape, max_running=running).bytes_for(demand.tokens, demand.concurrency)

    def holds(self, demand: Demand) -> bool:
        """Never easier for a larger demand."""
        if self.engine_pool is not None:
            return self.engine_pool.holds(demand.tokens, demand.concurrency)
        return self.needs(demand) <= self.limit

    def longest(self, concurrency: int, most: int) -> int:
        """Most tokens, up to `most`, that `concurrency` requests can each have; 0 if not even one."""
        return _largest(most, lambda tokens: self.holds(Demand(tokens, concurrency)))

    def most_requests(self, tokens: int) -> int:
        if self.engine_pool is not None:
            most = self.engine_pool.max_running
            return _largest(most, lambda requests: self.holds(Demand(tokens, requests)))
        data, _ = request_bytes(self.groups, max(1, tokens - 1))
        return _largest(self.limit // max(1, data) + 1, lambda requests: self.holds(Demand(tokens, requests)))


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest n in 1 .. most for which the monotone `holds` is true, or 0."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def too_long(demand: Demand, max_positions: int | None) -> bool:
    return max_positions is not None and demand.tokens > max_positions


def verdict_of(
    demand: Demand, room: Room, max_positions: int | None, tiers: Sequence[TierSpec]
) -> tuple[str, dict[str, int | str]]:
    """The verdict, exact ones first, and every single change that would make it `fits`."""
    if too_long(demand, max_positions):
        assert max_positions is not None
        longest = room.longest(demand.concurrency, max_positions)
        return "refused", {"tokens": longest} if longest else {}
    if room.holds(demand):
        return "fits", {}
    changes: dict[str, int | str] = {"kv_memory_bytes": room.needs(demand)}
    if longest := room.longest(demand.concurrency, demand.tokens - 1):
        changes["tokens"] = longest
    if 1 <= (requests := room.most_requests(demand.tokens)) < demand.concurrency:
        changes["concurrency"] = requests
    if smaller := _smaller_format(demand, room):
        changes["kv_format"] = smaller
    if _spills(demand, room, tiers):
        return "spills", changes
    return ("needs_quantization" if smaller else "refused"), changes


def _spills(demand: Demand, room: Room, tiers: Sequence[TierSpec]) -> bool:
    """Whether the tiers below the device hold what the pool cannot, and the pool can still compute."""
    lower = [tier.capacity_bytes for tier in tiers if tier.name != "g1"]
    over = room.needs(demand) - room.limit
    can_compute = room.shape(demand).min_kv_bytes <= room.limit
    return bool(lower) and can_compute and (None in lower or sum(size or 0 for size in lower) >= over)


def _smaller_format(demand: Demand, room: Room) -> str | None:
    """The widest integer format below the present one in which the demand would fit."""
    present = min(min(g.layout.k_format.bits, g.layout.v_format.bits) for g in room.groups)
    for name in ("int8", "int4"):
        fmt = FORMATS[name]
        whole = all(g.layout.k_dim * fmt.bits % 8 == 0 and g.layout.v_dim * fmt.bits % 8 == 0 for g in room.groups)
        if fmt.bits < present and whole:
            limit = room.limit if room.engine_pool is None else room.engine_pool.pool_bytes
            if Room(with_format(room.groups, fmt), room.chunk_tokens, limit).holds(demand):
                return name
    return None


def remedy_for(
    verdict: str,
    demand: Demand,
    room: Room,
    fits_with: dict[str, int | str],
    max_positions: int | None,
    fixed: Fixed,
) -> str | None:
    """One line: why, and what to change, the smallest change first."""
    if verdict == "fits":
        return None
    needed, limit = room.needs(demand), room.limit
    lead = f"needs {format_bytes(needed)} of KV memory, has {format_bytes(limit)}"
    if fixed.total:
        lead += f" beside {fixed.split(needed)}"
    if too_long(demand, max_positions):
        extend = f"extend it with --max-model-len {demand.tokens} --rope-scaling yarn"
        shorter = f"ask for at most {fits_with['tokens']:,}, or {extend}" if fits_with else f"{extend}; it also {lead}"
        return f"{demand.tokens:,} tokens exceed the model's {max_positions:,} positions: {shorter}"
    in_all = f", {format_bytes(fixed.total + needed)} in all" if fixed.total else ""
    texts: list[tuple[float, str]] = []
    for change, value in fits_with.items():
        if change == "tokens":
            texts.append((1 - int(value) / demand.tokens, f"at most {value:,} tokens"))
        elif change == "concurrency":
            texts.append((1 - int(value) / demand.concurrency, f"--concurrency {value}"))
        elif change == "kv_format":
            texts.append((0.5, f"--kv-format {value}"))
        else:
            texts.append((needed / max(limit, 1) - 1, f"--kv-memory {format_bytes(needed)} ({needed} bytes){in_all}"))
    if verdict == "spills":
        lead += "; the tiers hold the rest, but this version computes only from g1"
    return f"{lead}: " + "; or ".join(text for _, text in sorted(texts))
