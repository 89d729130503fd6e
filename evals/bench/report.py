"""A benchmark's answer: one JSON object, and a table of it for people."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import longctx
from longctx.evals.bench.job import Bench, Column, Job, Result
from longctx.evals.bench.limits import Limits, why_invalid
from longctx.machine import core_count, physical_bytes
from longctx.units import format_bytes


def make_report(bench: Bench, job: Job, result: Result, before: Limits, after: Limits) -> dict[str, Any]:
    """`rows`, `machine` and `config`; shares are of the best limits measured before and after."""
    limits = before.better(after)
    return {
        "bench": bench.name,
        "rows": [row.to_json(limits) for row in result.rows],
        **result.summary(limits),
        "machine": _machine(before, after),
        "config": _config(job),
        "failure": result.failure,
    }


def table_text(report: Mapping[str, Any], columns: Sequence[Column]) -> str:
    """The rows with the columns that any of them fills, what is summed up over them, the machine."""
    rows = report["rows"]
    shown = [c for c in columns if any(row.get(c.key) is not None for row in rows)]
    grid = [["model", "tokens", *(c.header for c in shown)]]
    for row in rows:
        tokens = "" if row["tokens"] is None else f"{row['tokens']:,}"
        grid.append([row["model"] or "", tokens, *(_cell(row.get(c.key), c) for c in shown)])
    lines = [*_aligned(grid), *(_profile_line(row) for row in rows if "profile" in row)]
    for key in ("fit", "prefill_fit", "decode_fit"):
        if key in report:
            lines.append(f"{key}: " + ", ".join(f"{name} {value:.3g}" for name, value in report[key].items()))
    return "\n".join([*lines, machine_line(report["machine"])])


def _aligned(grid: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the first column to the left and the others to the right; columns without any text are left out."""
    columns = [column for column in zip(*grid, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in zip(*columns, strict=True)
    ]


def machine_line(machine: Mapping[str, Any]) -> str:
    """The machine in one line, and whether the run counts."""
    limits = machine["limits"]
    text = (
        f"{machine['processor']}, {machine['threads']} threads, {format_bytes(machine['memory_bytes'])}: FMA peak "
        f"{limits['flops'] / 1e9:.0f} GFLOP/s, read {limits['read_bytes_per_s'] / 1e9:.1f} GB/s"
    )
    return text if machine["valid"] else f"{text}; NOT VALID: {'; '.join(machine['invalid_because'])}"


def _cell(value: Any, column: Column) -> str:
    if value is None:
        return ""
    return format(value if isinstance(value, str) or column.scale == 1.0 else value * column.scale, column.spec)


def _profile_line(row: Mapping[str, Any]) -> str:
    profile = row["profile"]
    parts = [f"{name.removesuffix('_ms')} {value:.2f}" for name, value in profile.items() if name.endswith("_ms")]
    return f"a step of {row['tokens']:,} in ms, mean of {profile['steps']}: " + ", ".join(parts)


def _machine(before: Limits, after: Limits) -> dict[str, Any]:
    reasons = why_invalid(before, after)
    return {
        "processor": _processor(),
        "cores": core_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": physical_bytes(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "limits": before.better(after).to_json(),
        "limits_before": before.to_json(),
        "limits_after": after.to_json(),
        "valid": not reasons,
        "invalid_because": reasons,
    }


def _config(job: Job) -> dict[str, Any]:
    return {
        "model": job.model,
        "lengths": None if job.lengths is None else list(job.lengths),
        "tokens": job.tokens,
        "repeats": job.repeats,
        "against": job.against,
        "trace": job.trace,
        "speedup": job.speedup,
        "options": dict(job.options),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "longctx": longctx.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
