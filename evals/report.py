"""A suite's report: one JSON object from its records, and a table of it for people."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from longctx.evals.depth_profile import Place, find_edge
from longctx.evals.grid import CELL, CONTROL, REFERENCE
from longctx.evals.reference import ENGINE_ERROR, OK
from longctx.evals.score import FOUND, NOT_IN_PROMPT

Record = Mapping[str, Any]


def make_report(
    name: str, records: Sequence[Record], config: Mapping[str, Any], sizes: Mapping[str, int], *, warm: bool
) -> dict[str, Any]:
    """`score`, `cells` and `config`, with controls and comparisons beside them: they never count in the score.

    `failure` says what makes the run no evidence, if anything does: a cold cell that was not cold, an answer that came
    without its needle, an engine that computes something else than its control.
    """
    tries = [r for r in records if r["kind"] == CELL]
    compared = [r for r in records if r["kind"] == REFERENCE]
    controls = [r for r in records if r["kind"] == CONTROL]
    cells = _cells(tries, compared)
    edge = find_edge([place for r in tries if (place := _place(r)) is not None], sizes)
    return {
        "eval": name,
        "score": statistics.fmean(cell["score"] for cell in cells) if cells else None,
        "cells": cells,
        "by_length": _means(cells, "length"),
        "by_task": _means(cells, "task"),
        "controls": [_without(r, "kind") for r in controls],
        "reference": [_without(r, "kind") for r in compared],
        "engine": _engine(compared),
        "suspect": None if edge is None else str(edge),
        "failure": _failure(tries, controls, compared, warm),
        "config": dict(config),
    }


def _cells(tries: Sequence[Record], compared: Sequence[Record]) -> list[dict[str, Any]]:
    """One cell per length, depth and task: the mean of its tries, and the commonest miss where there is one."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in tries:
        groups.setdefault((record["length"], record["depth"], record["task"]), []).append(record)
    verdicts = {(r["length"], r["depth"], r["task"], r["sample"]): r["verdict"] for r in compared}
    cells = []
    for (length, depth, task), group in sorted(
        groups.items(), key=lambda item: (item[0][2], item[0][0], item[0][1] or 0)
    ):
        misses = Counter(r["outcome"] for r in group if r["outcome"] != FOUND)
        outcome = misses.most_common(1)[0][0] if misses else FOUND
        cell = {
            "length": length,
            "depth": depth,
            "task": task,
            "score": statistics.fmean(r["score"] for r in group),
            "outcome": outcome,
            "cached_tokens": _sum(r["cached_tokens"] for r in group),
            "prompt_tokens": group[0]["prompt_tokens"],
            "needle_depths": group[0]["needle_depths"],
            "tries": [_without(r, "kind", "length", "depth", "task", "needle_depths") for r in group],
        }
        causes = [verdicts[key] for r in group if (key := (length, depth, task, r["sample"])) in verdicts]
        if causes:
            cell["engine"] = next((c for c in causes if c != OK), OK)
        if misses and causes:
            cell["cause"] = "model error" if cell["engine"] == OK else cell["engine"]
        cells.append(cell)
    return cells


def _engine(compared: Sequence[Record]) -> dict[str, Any]:
    """The verdict over all comparisons; `not compared` where there was none."""
    if not compared:
        return {"verdict": "not compared", "max_logprob_difference": None, "cells": 0}
    worst = max(compared, key=lambda r: r["max_logprob_difference"])
    verdict = next((r["verdict"] for r in compared if r["verdict"] == ENGINE_ERROR), worst["verdict"])
    return {
        "verdict": verdict,
        "max_logprob_difference": worst["max_logprob_difference"],
        "cells": len(compared),
    }


def _failure(tries: Sequence[Record], controls: Sequence[Record], compared: Sequence[Record], warm: bool) -> str | None:
    reasons = []
    reused = [r for r in tries if r["cached_tokens"]]
    if reused and not warm:
        cached, prompt = reused[0]["cached_tokens"], reused[0]["prompt_tokens"]
        reasons.append(
            f"{len(reused)} of {len(tries)} cold cells took tokens from the cache (first {cached:,} of {prompt:,}): "
            "turn the server's prefix cache off, or say --warm"
        )
    if leaks := sum(r["outcome"] == "leak" for r in controls):
        reasons.append(f"{leaks} questions were answered without their needle, so finding it proves nothing")
    if lost := sum(r["outcome"] == NOT_IN_PROMPT for r in tries):
        reasons.append(f"{lost} prompts were built without their needle")
    if faults := [r for r in compared if r["verdict"] == ENGINE_ERROR]:
        worst = max(faults, key=lambda r: r["max_logprob_difference"])
        reasons.append(
            f"engine error: at {worst['length']:,} tokens its logprobs differ by {worst['max_logprob_difference']:.1e} "
            f"from the control's ({len(faults)} of {len(compared)} cells compared)"
        )
    return "; ".join(reasons) or None


def _place(record: Record) -> Place | None:
    """Where the first needle stands before the end; None for a task without depths."""
    if not record["needle_depths"]:
        return None
    return Place(record["length"], round(record["prompt_tokens"] * (1 - record["needle_depths"][0])), record["score"])


def _means(cells: Sequence[Record], key: str) -> dict[str, float]:
    values = sorted({cell[key] for cell in cells})
    return {str(value): statistics.fmean(c["score"] for c in cells if c[key] == value) for value in values}


def _sum(values: Any) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _without(record: Record, *names: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in names}


def table_text(report: Mapping[str, Any]) -> str:
    """Scores by length and depth (or by task and length), the misses behind them, the verdicts."""
    lines: list[str] = []
    cells = report["cells"]
    if any(cell["depth"] is not None for cell in cells):
        for task in dict.fromkeys(cell["task"] for cell in cells):
            ours = [cell for cell in cells if cell["task"] == task]
            lines += _grid(f"{task}: tokens", ours, "length", "depth", "depth ")
    else:
        lines += _grid("task", cells, "task", "length", "")
    misses = Counter(cell.get("cause", cell["outcome"]) for cell in cells if cell["outcome"] != FOUND)
    if misses:
        lines.append("misses: " + ", ".join(f"{count} {name}" for name, count in misses.most_common()))
    engine = report["engine"]
    if engine["cells"]:
        lines.append(
            f"engine: {engine['verdict']}, {engine['cells']} cells beside Hugging Face in float32, logprobs within "
            f"{engine['max_logprob_difference']:.1e}"
        )
    if report["suspect"]:
        lines.append(report["suspect"])
    score = "no cells" if report["score"] is None else f"{report['score']:.1%} of {len(cells)} cells"
    return "\n".join([*lines, f"score: {score}"])


def _grid(corner: str, cells: Sequence[Record], row_key: str, column_key: str, prefix: str) -> list[str]:
    columns = sorted({cell[column_key] for cell in cells})
    by_place = {(cell[row_key], cell[column_key]): cell for cell in cells}
    header = [corner, *(f"{prefix}{c:,}" if isinstance(c, int) else f"{prefix}{c:g}" for c in columns)]
    rows = [header]
    for row in dict.fromkeys(cell[row_key] for cell in cells):
        name = f"{row:,}" if isinstance(row, int) else str(row)
        rows.append([name, *(_mark(by_place.get((row, column))) for column in columns)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _mark(cell: Record | None) -> str:
    if cell is None:
        return ""
    return "found" if cell["outcome"] == FOUND else f"{cell['score']:.0%} {cell['outcome']}"
