"""The drift report as a picture: KL along the text, KL by window of the decode, the error of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longctx.evals.figure import new_figure
from longctx.units import format_tokens

_FLOOR = 1e-12
"""Below it nothing is drawn: a logarithm has no place for zero."""


def write_drift(report: Mapping[str, Any], path: Path) -> None:
    """One row of panels per length; a PNG, or what `path` ends with."""
    cells = [cell for cell in report["cells"] if cell["error"] is None]
    lengths = sorted({cell["length"] for cell in cells}) or [0]
    figure = new_figure(12.0, 3.2 * len(lengths) + 0.4)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(len(lengths), 3, squeeze=False)
    for row, length in zip(axes, lengths, strict=True):
        mine = [cell for cell in cells if cell["length"] == length]
        _along(row[0], mine, length)
        _windows(row[1], mine)
        _layers(row[2], mine)
    model = report["config"]["model"]
    figure.suptitle(f"drift: {model}, suggested {report['suggested']['kv_format'] or 'auto'}", fontsize=10)
    figure.savefig(path, format=path.suffix.lstrip(".") if path.suffix in (".png", ".svg", ".pdf") else "png", dpi=150)


def _along(axis: Any, cells: list[Mapping[str, Any]], length: int) -> None:
    for cell in cells:
        places, values = zip(*cell["curve"], strict=True)
        axis.plot(places, [max(v, _FLOOR) for v in values], label=cell["format"], linewidth=1.2)
        axis.axvline(cell["first_decoded"], color="grey", linewidth=0.6, linestyle=":")
    axis.set(yscale="log", xlabel="position (dotted: decode begins)", ylabel="KL, nats")
    axis.set_title(f"{format_tokens(length)} tokens", fontsize=9)
    if cells:
        axis.legend(fontsize=7)


def _windows(axis: Any, cells: list[Mapping[str, Any]]) -> None:
    for cell in cells:
        numbers = range(1, len(cell["windows"]) + 1)
        axis.plot(numbers, [max(v, _FLOOR) for v in cell["windows"]], marker="o", linewidth=1.2, label=cell["format"])
    axis.set(yscale="log", xlabel="window of the decode", ylabel="mean KL, nats")
    axis.set_xticks([1, 2, 3, 4])
    axis.set_title("does it compound?", fontsize=9)


def _layers(axis: Any, cells: list[Mapping[str, Any]]) -> None:
    for cell in cells:
        axis.plot([100 * max(e, _FLOOR) for e in cell["layer_errors"]], marker=".", linewidth=1.0, label=cell["format"])
    axis.set(yscale="log", xlabel="layer", ylabel="error of attention output, %")
    axis.set_title("layer by layer", fontsize=9)
