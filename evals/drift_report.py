"""The drift report: one JSON object from its records, the policy it suggests, and a table of it for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from longctx.evals.drift_answers import first_difference
from longctx.evals.reference import ENGINE_ERROR
from longctx.units import format_tokens

TEXT, ANSWERS, GREEDY, CONTROL = "text", "answers", "greedy", "control"
"""What a record is of: one text's logits, its questions, greedy texts, the same text through Hugging Face."""

EXACT = "exact"
"""The name of the run that others are compared with: fp32 KV, whole weights."""

WINDOWS = 4
MOST_GROWTH = 2.0
"""The last window's mean KL may be so many times the first's: more is compounding."""

MOST_KL, LEAST_TOP1 = 0.01, 0.95
"""What a suggested format may cost: the mean KL in nats, and how often the likeliest token is the same."""

_CURVE_POINTS = 64

Record = Mapping[str, Any]


def make_report(records: Sequence[Record], config: Mapping[str, Any]) -> dict[str, Any]:
    """`score` (how often the likeliest token is the same), one of `cells` per format and length, `config` and more.

    `failure` says what makes the run no evidence: an exact run that is not what Hugging Face computes, or a format
    whose logits are no numbers.
    """
    cells = [_cell(r, records) for r in records if r["kind"] == TEXT]
    controls = [_without(r) for r in records if r["kind"] == CONTROL]
    scores = [cell["score"] for cell in cells]
    return {
        "eval": config["suite"],
        "score": float(np.mean(scores)) if scores else None,
        "cells": cells,
        "greedy": _greedy(records),
        "control": controls,
        "suggested": suggest(cells),
        "limits": {"kl": MOST_KL, "top1": LEAST_TOP1, "growth": MOST_GROWTH},
        "failure": _failure(cells, controls),
        "config": dict(config),
    }


def _cell(record: Record, records: Sequence[Record]) -> dict[str, Any]:
    """One format at one length: KL of all positions, of those read and of those decoded, and how it grows."""
    head = {key: record[key] for key in ("format", "length", "note", "error")}
    if record["error"] is not None:
        return {**head, "score": 0.0}
    kl, positions = np.array(record["kl"]), np.array(record["positions"])
    decoded = positions >= record["first_decoded"]
    windows = [float(part.mean()) for part in np.array_split(kl[decoded], WINDOWS)]
    growth = windows[-1] / windows[0] if windows[0] > 0 else None
    top1 = float(np.mean(record["same_top"]))
    answers = {r["format"]: r for r in records if r["kind"] == ANSWERS and r["length"] == record["length"]}
    mine, exact = answers.get(record["format"], {}), answers.get(EXACT, {})
    return {
        **head,
        "score": top1,
        "top1": top1,
        "kl": summary(kl),
        "kl_read": summary(kl[~decoded]),
        "kl_decoded": summary(kl[decoded]),
        "windows": windows,
        "growth": growth,
        "compounds": windows[-1] > MOST_GROWTH * windows[0],
        "perplexity": record["perplexity"],
        "exact_perplexity": record["exact_perplexity"],
        "layer_errors": record["layer_errors"],
        "bytes_per_token": record["bytes_per_token"],
        "needles": _beside(mine.get("needles"), exact.get("needles")),
        "tasks": _beside(mine.get("tasks"), exact.get("tasks")),
        "first_decoded": record["first_decoded"],
        "curve": _curve(positions, kl),
    }


def summary(kl: np.ndarray) -> dict[str, float]:
    """Mean, 99th percentile and maximum."""
    return {"mean": float(kl.mean()), "p99": float(np.percentile(kl, 99)), "max": float(kl.max())}


def _beside(mine: Mapping[str, Any] | None, exact: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A score with the exact run's, and how many answers are the same to the letter."""
    if mine is None or exact is None:
        return None
    same = [a == b for a, b in zip(mine["answers"], exact["answers"], strict=True)]
    return {"score": mine["score"], "exact_score": exact["score"], "same_answers": sum(same), "answers": len(same)}


def _curve(positions: np.ndarray, kl: np.ndarray) -> list[list[float]]:
    """[position, mean KL] of neighbours, few enough to draw."""
    parts = min(_CURVE_POINTS, len(kl))
    pairs = zip(np.array_split(positions, parts), np.array_split(kl, parts), strict=True)
    return [[float(p.mean()), float(k.mean())] for p, k in pairs]


def _greedy(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Of each format and prompt the first token that differs from the exact run's text, and both texts from there."""
    texts = {r["format"]: r["texts"] for r in records if r["kind"] == GREEDY}
    found = []
    for name, mine in texts.items():
        for ours, exact in zip(mine, texts[EXACT], strict=True):
            if name == EXACT:
                continue
            first = first_difference(exact["token_ids"], ours["token_ids"])
            same = next((i for i, (a, b) in enumerate(zip(exact["text"], ours["text"], strict=False)) if a != b), None)
            found.append(
                {
                    "format": name,
                    "prompt": exact["prompt"],
                    "tokens": len(exact["token_ids"]),
                    "first_difference": first,
                    "exact_text": None if first is None else exact["text"][same:],
                    "text": None if first is None else ours["text"][same:],
                }
            )
    return found


def suggest(cells: Sequence[Record]) -> dict[str, Any]:
    """The format of the fewest bytes among those measured that keeps within the limits at every length."""
    good = []
    for name in dict.fromkeys(cell["format"] for cell in cells):
        mine = [cell for cell in cells if cell["format"] == name]
        if all(cell["error"] is None and not exceeds(cell) for cell in mine):
            good.append((mine[0]["bytes_per_token"], name))
    if not good:
        return {"kv_format": None, "why": "none of the formats measured keeps within the limits: keep auto"}
    size, name = min(good)
    return {"kv_format": name, "why": f"the fewest bytes ({size:,} per token) among those within the limits"}


def exceeds(cell: Record) -> str:
    """Which limit a cell breaks, in words; empty if none."""
    if cell["kl"]["mean"] > MOST_KL:
        return f"KL {cell['kl']['mean']:.2g} is above {MOST_KL:g}"
    if cell["top1"] < LEAST_TOP1:
        return f"the likeliest token is the same at {cell['top1']:.1%}, below {LEAST_TOP1:.0%}"
    if cell["compounds"]:
        return f"the last window's KL is more than {MOST_GROWTH:g} times the first's"
    return ""


def _failure(cells: Sequence[Record], controls: Sequence[Record]) -> str | None:
    reasons = [
        f"engine error: at {c['length']:,} tokens the exact run's logprobs differ by {c['max_logprob_difference']:.1e} "
        "from Hugging Face's"
        for c in controls
        if c["verdict"] == ENGINE_ERROR
    ]
    reasons += [f"{c['format']} at {c['length']:,} tokens: {c['error']}" for c in cells if c["error"] is not None]
    return "; ".join(reasons) or None


def _without(record: Record) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("kind", "format")}


def table_text(report: Mapping[str, Any]) -> str:
    """The cells as a table, then greedy texts, the control and the suggestion in words."""
    lines = _aligned([COLUMNS, *(cell_texts(cell) for cell in report["cells"])])
    for name in dict.fromkeys(text["format"] for text in report["greedy"]):
        lines.append(greedy_text(name, report["greedy"]))
    lines += [control_text(control) for control in report["control"]]
    return "\n".join([*lines, suggestion_text(report)])


COLUMNS = (
    *("format", "tokens", "bytes/token", "KL mean", "p99", "max", "top-1", "perplexity"),
    *("KL by window", "growth", "worst layer", "needles", "task"),
)


def cell_texts(cell: Record) -> tuple[str, ...]:
    """A cell's texts under `COLUMNS`."""
    head = (str(cell["format"]), format_tokens(cell["length"]))
    if cell["error"] is not None:
        return (*head, "", "no numbers", *[""] * (len(COLUMNS) - 4))
    kl, errors = cell["kl"], cell["layer_errors"]
    growth = "" if cell["growth"] is None else f"{cell['growth']:.2f}"
    return (
        *head,
        f"{cell['bytes_per_token']:,}",
        *(f"{kl[key]:.2g}" for key in ("mean", "p99", "max")),
        f"{cell['top1']:.2%}",
        f"{cell['perplexity']:.4g} ({cell['exact_perplexity']:.4g})",
        " ".join(f"{x:.1g}" for x in cell["windows"]),
        f"{growth} compounds" if cell["compounds"] else growth,
        f"{max(errors):.1%} ({int(np.argmax(errors))})",
        *(_answers_text(cell[key]) for key in ("needles", "tasks")),
    )


def _answers_text(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "no room"
    return f"{found['score']:.0%} ({found['exact_score']:.0%}), {found['same_answers']}/{found['answers']} alike"


def greedy_text(name: str, texts: Sequence[Record]) -> str:
    """ "greedy, int8: 2 of 3 texts unchanged; the others differ from token 17"."""
    mine = [text for text in texts if text["format"] == name]
    changed = [text["first_difference"] for text in mine if text["first_difference"] is not None]
    tail = f"; the others from token {', '.join(f'{n:,}' for n in changed)}" if changed else ""
    longest = max(text["tokens"] for text in mine)
    return f"greedy, {name}: {len(mine) - len(changed)} of {len(mine)} texts of up to {longest} tokens unchanged{tail}"


def control_text(control: Record) -> str:
    return (
        f"Hugging Face at {control['length']:,} tokens: {control['verdict']}, logprobs within "
        f"{control['max_logprob_difference']:.1e}, KL at most {control['kl']:.1e}"
    )


def suggestion_text(report: Mapping[str, Any]) -> str:
    """The suggestion with its rule."""
    suggested, limits = report["suggested"], report["limits"]
    rule = f"KL at most {limits['kl']:g}, top-1 at least {limits['top1']:.0%}, growth at most {limits['growth']:g}"
    return f"suggested: {suggested['kv_format'] or 'auto'} ({suggested['why']}; {rule})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
