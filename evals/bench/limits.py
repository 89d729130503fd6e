"""The machine's limits: the peak of fused multiply-adds and the read bandwidth, measured on all threads."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from longctx.evals.bench.kernels import fma_flops, fma_loop, read_floats

FLOPS_PARTS = ("fma4_flops", "fma8_flops", "fma16_flops", "sgemm_flops")
READ_PARTS = ("read_loop_bytes_per_s", "torch_sum_bytes_per_s")
BEST_OF = 5
READ_BYTES = 2**30
LANES = (4, 8, 16)
"""Vector widths tried: those of NEON, AVX2 and AVX-512. One wider than the machine's is only slower."""

LEAST_FLOPS_PER_THREAD = 80e9
"""On x86: a peak below this means that something else used the cores, or that the loop was not what it should be."""

MOST_DRIFT = 0.15
"""A limit that moved by more between before and after says that the machine was not quiet."""


@dataclass(frozen=True)
class Limits:
    """Operations and bytes read per second, the best of what each kind of loop reached (by name, in `parts`)."""

    flops: float
    read_bytes_per_s: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def better(self, other: Limits) -> Limits:
        """The best of two measurements."""
        names = dict.fromkeys([*self.parts, *other.parts])
        parts = {name: max(self.parts.get(name, 0.0), other.parts.get(name, 0.0)) for name in names}
        return Limits(max(self.flops, other.flops), max(self.read_bytes_per_s, other.read_bytes_per_s), parts)

    def to_json(self) -> dict[str, float]:
        return {"flops": self.flops, "read_bytes_per_s": self.read_bytes_per_s, **self.parts}


def measure_limits(
    *, best_of: int = BEST_OF, read_bytes: int = READ_BYTES, iterations: int = 2_000_000, gemm_size: int = 2048
) -> Limits:
    """Measure for some seconds, on `torch.get_num_threads()` threads.

    The multiply-add peak is the best of register loops of each vector width and of a large matrix product; the read
    bandwidth is the best of a loop over `read_bytes` and `torch.sum`.
    """
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, thread_name_prefix="limits") as pool:
        loops = [_fma_flops(pool, threads, lanes, iterations, best_of) for lanes in LANES]
        flops = dict(zip(FLOPS_PARTS, [*loops, _sgemm_flops(gemm_size, best_of)], strict=True))
        reads = _read_speeds(pool, threads, read_bytes, best_of)
    return Limits(max(flops.values()), max(reads.values()), {**flops, **reads})


def why_invalid(before: Limits, after: Limits) -> list[str]:
    """What is wrong with a run between two measurements; empty if nothing is."""
    reasons = []
    threads = torch.get_num_threads()
    peak = max(before.flops, after.flops)
    least = LEAST_FLOPS_PER_THREAD * threads
    if platform.machine().lower() in ("x86_64", "amd64") and peak < least:
        reasons.append(f"FMA peak {peak / 1e9:.0f} GFLOP/s is below {least / 1e9:.0f} on {threads} threads")
    for name in ("flops", "read_bytes_per_s"):
        low, high = sorted((getattr(before, name), getattr(after, name)))
        if low < (1 - MOST_DRIFT) * high:
            reasons.append(f"{name} moved from {getattr(before, name):.3g} to {getattr(after, name):.3g}")
    return reasons


def _fma_flops(pool: ThreadPoolExecutor, threads: int, lanes: int, iterations: int, best_of: int) -> float:
    loop = fma_loop(lanes)
    loop(1)
    seconds = _best(lambda: list(pool.map(loop, [iterations] * threads)), best_of)
    return threads * fma_flops(lanes, iterations) / seconds


def _sgemm_flops(size: int, best_of: int) -> float:
    a, b, out = torch.ones(size, size), torch.ones(size, size), torch.empty(size, size)
    return 2 * size**3 / _best(lambda: torch.mm(a, b, out=out), best_of)


def _read_speeds(pool: ThreadPoolExecutor, threads: int, num_bytes: int, best_of: int) -> dict[str, float]:
    values = torch.ones(num_bytes // 4)
    shares = np.array_split(values.numpy(), threads)
    read_floats(shares[0][:1])
    loop_s = _best(lambda: list(pool.map(read_floats, shares)), best_of)
    speeds = (num_bytes / loop_s, num_bytes / _best(values.sum, best_of))
    return dict(zip(READ_PARTS, speeds, strict=True))


def _best(work: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of `times` calls after one that does not count."""
    work()
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
