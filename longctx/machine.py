"""What this machine has and does: memory, cores, and two quick measurements of its speed."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MachineSpeed:
    """What was reached: `flops` of a model-like fp32 product (2 per multiply-add), `read_bytes_per_s` of a long sum."""

    flops: float
    read_bytes_per_s: float


def physical_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes of RAM, or of this container's limit where that is less."""
    limit = _cgroup_bytes(cgroup, "memory.max", "memory/memory.limit_in_bytes")
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes this process may hold in all: what can be allocated now without swapping, and what it holds already.

    So the answer is the same before and after the weights were loaded.
    """
    held = psutil.Process().memory_info()
    own = int(held.rss - getattr(held, "shared", 0))
    return own + _free_bytes(cgroup)


def _free_bytes(cgroup: Path) -> int:
    available = int(psutil.virtual_memory().available)
    limit = _cgroup_bytes(cgroup, "memory.max", "memory/memory.limit_in_bytes")
    used = _cgroup_bytes(cgroup, "memory.current", "memory/memory.usage_in_bytes")
    if limit is None or used is None:
        return available
    return min(available, max(0, limit - used + _reclaimable(cgroup)))


def _cgroup_bytes(cgroup: Path, *names: str) -> int | None:
    """A number from a cgroup v2 or v1 file; None where there is no such file or it says "max"."""
    for name in names:
        try:
            text = (cgroup / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _reclaimable(cgroup: Path) -> int:
    """Page cache counted as used that the kernel gives back first."""
    for name in ("memory.stat", "memory/memory.stat"):
        try:
            lines = (cgroup / name).read_text().splitlines()
        except OSError:
            continue
        return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return 0


def core_count() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fingerprint() -> str:
    """A short name that changes when measured speeds no longer apply: processor, instruction sets, cores."""
    parts = [platform.machine(), platform.processor(), str(core_count())]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for field in ("model name", "flags"):
        parts.extend(line for line in lines if line.startswith(field))
        parts = list(dict.fromkeys(parts))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def measure_speed(seconds: float = 0.3) -> MachineSpeed:
    """Measure for about `seconds`: the best product of a 512-token chunk and a model-like weight, and the best sum.

    Neither is the machine's peak (see docs/conventions.md for that); both are what ordinary kernels reach here.
    """
    x_TC, w_CF = torch.ones(512, 1024), torch.ones(1024, 2048)
    out_TF = torch.empty(512, 2048)
    product_s = _best_seconds(lambda: torch.mm(x_TC, w_CF, out=out_TF), seconds / 2)
    flat = torch.ones(32 * 1024 * 1024)
    read_s = _best_seconds(flat.sum, seconds / 2)
    return MachineSpeed(2 * 512 * 1024 * 2048 / product_s, flat.numel() * 4 / read_s)


@functools.cache
def measured() -> MachineSpeed:
    """`measure_speed`, once per process."""
    return measure_speed()


def _best_seconds(work: Callable[[], object], budget_s: float) -> float:
    work()
    best, end = float("inf"), time.perf_counter() + budget_s
    while True:
        start = time.perf_counter()
        work()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best
