"""The drift report as one HTML page: no script, no outside resource."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from longctx.evals.drift_report import COLUMNS, cell_texts, control_text, exceeds, greedy_text, suggestion_text
from longctx.evals.html import make_page

_SHOWN_CHARS = 300


def drift_page(report: Mapping[str, Any]) -> str:
    """The whole page: verdicts, the table, each layer's error, where greedy texts differ, the configuration."""
    config, cells = report["config"], report["cells"]
    weights = "" if config["weights_mode"] is None else f", weights in {config['weights_mode']}"
    title = f"drift: {config['model']}, {', '.join(config['kv_formats'])}{weights}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p><small>{escape(report.get('date', ''))}, longctx {escape(str(config.get('longctx')))}</small></p>",
        *_verdicts(report),
        "<h2>Beside the exact run</h2>",
        _table(COLUMNS, [cell_texts(cell) for cell in cells]),
        "<p>KL in nats, exact || format. In brackets: the exact run's figure, or the layer's number. Windows are those "
        "of the tokens that were decoded one by one.</p>",
        _layers([cell for cell in cells if cell["error"] is None]),
        _greedy(report["greedy"]),
        f"<h2>Configuration</h2><pre>{escape(json.dumps(config, indent=1))}</pre>",
    ]
    return make_page(title, parts)


def _verdicts(report: Mapping[str, Any]) -> list[str]:
    lines = [(suggestion_text(report), False)]
    lines += [(control_text(c), c["verdict"] == "engine error") for c in report["control"]]
    lines += [
        (f"{cell['format']} at {cell['length']:,} tokens: {why}", True)
        for cell in report["cells"]
        if cell["error"] is None and (why := exceeds(cell))
    ]
    if report["failure"]:
        lines.append((report["failure"], True))
    return [f'<p class="verdict{" bad" if bad else ""}">{escape(text)}</p>' for text, bad in lines]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{escape(h)}</th>" for h in head)}</tr>{body}</table></div>'


def _layers(cells: Sequence[Mapping[str, Any]]) -> str:
    if not cells:
        return ""
    head = ["layer", *(f"{cell['format']}, {cell['length']:,}" for cell in cells)]
    errors = zip(*(cell["layer_errors"] for cell in cells), strict=True)
    rows = [[str(layer), *(f"{x:.2%}" for x in row)] for layer, row in enumerate(errors)]
    note = "<p>Relative to the exact run's, with what the layers before it have changed.</p>"
    return f"<h2>Error of each layer's attention output</h2>{note}{_table(head, rows)}"


def _greedy(texts: Sequence[Mapping[str, Any]]) -> str:
    if not texts:
        return ""
    parts = ["<h2>Greedy texts</h2>"]
    parts += [f"<p>{escape(greedy_text(name, texts))}</p>" for name in dict.fromkeys(t["format"] for t in texts)]
    changed = [t for t in texts if t["first_difference"] is not None]
    if changed:
        names = ("format", "prompt", "exact_text", "text")
        body = "".join(
            f"<tr>{''.join(f'<td class=text>{escape(t[key][:_SHOWN_CHARS])}</td>' for key in names)}"
            f"<td>{t['first_difference']:,}</td></tr>"
            for t in changed
        )
        head = "".join(f"<th>{h}</th>" for h in ("format", "prompt", "the exact run goes on", "the format", "token"))
        parts.append(f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>')
    return "".join(parts)
