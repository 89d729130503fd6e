"""What a run added to the process: the peak of resident memory since a moment, beside what the plan said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int | None:
    """Resident bytes now, or None where the system does not say."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int | None:
    """The most resident bytes since `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> bool:
    """Forget the peak so far; False where the system cannot."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int | None:
    if not _STATUS.exists():
        return None
    line = next((line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:")), None)
    return None if line is None else int(line.split()[1]) * 1024


class GrowthWatch:
    """RSS growth = peak - RSS after weights and before pools.

    "After weights" is taken at its word: mapped weights are read once, so that an embedding row that is first looked up
    later does not count as growth. Made after a warm-up, whose compiled code is the process's and whose blocks of the
    pool are taken off the base again.
    """

    def __init__(self, engine: Any):
        for parameter in engine.loaded.model.parameters():
            torch.sum(parameter)
        now = resident_bytes()
        self.base_bytes = None if now is None or not reset_peak() else now - _touched_bytes(engine)

    def growth_bytes(self) -> int | None:
        """Peak since the watch was made, minus the base; None where it cannot be measured."""
        peak = peak_bytes()
        return None if peak is None or self.base_bytes is None else peak - self.base_bytes


def planned_growth_bytes(plan: Any) -> int:
    """What a plan says a run adds to the loaded process: the pool and the workspace of a step."""
    return int(plan.pool_bytes + plan.workspace_bytes)


def _touched_bytes(engine: Any) -> int:
    """Bytes of the pool's blocks that hold something, hence are resident."""
    stats = engine.cache_stats()
    return sum((s.held + s.cached) * engine.groups[s.group].layout.block_bytes for s in stats)
