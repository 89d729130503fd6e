"""A picture of a routing sweep: what each policy computes, and how long users wait, by the number of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longctx.evals.figure import new_figure
from longctx.evals.route_sim import POLICIES, PolicyResult, Workload


def draw_sweep(cells: Sequence[tuple[Workload, dict[str, PolicyResult]]], path: Path) -> None:
    """Two panels over the number of replicas: prefill tokens, and the mean time to first token."""
    figure = new_figure(9.0, 3.6)
    tokens, times = figure.subplots(1, 2)
    counts = [work.replicas for work, _ in cells]
    for name in POLICIES:
        label = name.replace("_", " ")
        tokens.plot(counts, [results[name].prefill_tokens for _, results in cells], marker="o", label=label)
        times.plot(counts, [results[name].ttft_mean_s for _, results in cells], marker="o", label=label)
    for axes, title in ((tokens, "tokens computed by all replicas"), (times, "mean time to first token, s")):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("replicas")
        axes.set_xticks(counts)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    tokens.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
