"""What a run added to the process: the peak of resident memory since a moment, beside what the plan said."""

from __future__ import annotations

from typing import Any

import torch

from longctx.resident import peak_rss_bytes, reset_peak, resident_bytes


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
        peak = peak_rss_bytes()
        return None if peak is None or self.base_bytes is None else peak - self.base_bytes


def planned_growth_bytes(plan: Any) -> int:
    """What a plan says a run adds to the loaded process: the pool and the workspace of a step."""
    return int(plan.pool_bytes + plan.workspace_bytes)


def _touched_bytes(engine: Any) -> int:
    """Bytes of the pool's blocks that hold something, hence are resident."""
    stats = engine.cache_stats()
    return sum((s.held + s.cached) * engine.groups[s.group].layout.block_bytes for s in stats)
