"""A suite's scores as a picture: length across, depth (or task) down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from longctx.evals.score import FOUND

_COLOURS = "viridis"
_LABELS = {"not_in_prompt": "no needle", "engine error": "ENGINE", "model error": "model"}


def write_heatmap(report: Mapping[str, Any], path: Path) -> None:
    """Draw every cell with its score and, where it missed, why; a PNG, or what `path` ends with."""
    cells = report["cells"]
    has_depths = any(cell["depth"] is not None for cell in cells)
    groups = list(dict.fromkeys(cell["task"] for cell in cells)) if has_depths else [None]
    lengths = sorted({cell["length"] for cell in cells})
    shown = [[c for c in cells if group is None or c["task"] == group] for group in groups]
    heights = [0.55 * len({c["depth"] if has_depths else c["task"] for c in ours}) + 1.1 for ours in shown]
    figure = Figure(figsize=(max(5.0, 1.05 * len(lengths) + 2.6), sum(heights) + 0.7), layout="constrained", dpi=150)
    axes = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, group, ours in zip(axes, groups, shown, strict=True):
        image = _draw(axis, ours, lengths, "depth" if has_depths else "task")
        if len(groups) > 1:
            axis.set_title(str(group), fontsize=9)
    figure.colorbar(image, ax=list(axes), label="score", shrink=0.9)
    score = "" if report["score"] is None else f", score {report['score']:.1%}"
    verdict = report["engine"]["verdict"]
    figure.suptitle(f"{report['eval']}: {report['config']['model']}{score}\nengine: {verdict}", fontsize=10)
    figure.savefig(path, format=path.suffix.lstrip(".") if path.suffix in (".png", ".svg", ".pdf") else "png")


def _draw(axis: Any, cells: Sequence[Mapping[str, Any]], lengths: Sequence[int], row_key: str) -> Any:
    rows = list(dict.fromkeys(cell[row_key] for cell in cells))
    if row_key == "depth":
        rows.sort()
    grid = np.full((len(rows), len(lengths)), np.nan)
    for cell in cells:
        grid[rows.index(cell[row_key]), lengths.index(cell["length"])] = cell["score"]
    image = axis.imshow(grid, cmap=_COLOURS, vmin=0.0, vmax=1.0, aspect="auto")
    for cell in cells:
        label = f"{cell['score']:.0%}"
        if cell["outcome"] != FOUND:
            why = str(cell.get("cause", cell["outcome"]))
            label += f"\n{_LABELS.get(why, why)}"
        place = lengths.index(cell["length"]), rows.index(cell[row_key])
        colour = "black" if cell["score"] > 0.6 else "white"
        axis.text(*place, label, ha="center", va="center", fontsize=7, color=colour)
    axis.set_xticks(range(len(lengths)), [_tokens(n) for n in lengths])
    axis.set_yticks(range(len(rows)), [f"{row:.0%}" if row_key == "depth" else str(row) for row in rows])
    axis.set_xlabel("tokens, prompt and answer")
    axis.set_ylabel("depth of the needle" if row_key == "depth" else "")
    return image


def _tokens(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else f"{n / 1024:g}K" if n % 512 == 0 else f"{n:,}"
