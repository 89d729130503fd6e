"""A suite's report as one HTML file: no script, no outside resource, readable in light and dark and on paper."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from longctx.evals.score import FOUND

Cell = Mapping[str, Any]

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; } th, td { padding: .35rem .6rem; border: 1px solid var(--line); text-align: right; }
th { font-weight: 600; background: var(--soft); }
td.text { text-align: left; } td.cell { text-align: center; color: #111; }
.verdict { padding: .6rem .8rem; border-left: 4px solid #2a7; background: var(--soft); }
.verdict.bad { border-color: #c33; }
pre { overflow-x: auto; background: var(--soft); padding: .8rem; } small { opacity: .75; }
"""


def html_page(report: Mapping[str, Any]) -> str:
    """The whole page."""
    config, cells = report["config"], report["cells"]
    title = f"{report['eval']}: {config['model']}"
    score = "no cells" if report["score"] is None else f"{report['score']:.1%}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p><strong>Score {score}</strong> over {len(cells)} cells. <small>{escape(report.get('date', ''))}, longctx "
        f"{escape(str(config.get('longctx')))}</small></p>",
        *_verdicts(report),
        *_tables(cells),
        _misses(cells),
        _controls(report),
        f"<h2>Configuration</h2><pre>{escape(json.dumps(config, indent=1))}</pre>",
    ]
    return make_page(title, parts)


def make_page(title: str, parts: Sequence[str]) -> str:
    """A page of ready-made parts, in the style of every report."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html><html lang="en"><head>{head}<title>{escape(title)}</title><style>{_STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _verdicts(report: Mapping[str, Any]) -> list[str]:
    engine = report["engine"]
    lines = []
    if engine["cells"]:
        text = (
            f"Engine: {engine['verdict']}. {engine['cells']} cells were computed again by Hugging Face in float32 and "
            f"without a cache; logprobs differ by at most {engine['max_logprob_difference']:.1e}."
        )
        lines.append((text, engine["verdict"] == "engine error"))
    lines += [(report[key], True) for key in ("failure", "suspect") if report[key]]
    return [f'<p class="verdict{" bad" if bad else ""}">{escape(text)}</p>' for text, bad in lines]


def _tables(cells: Sequence[Cell]) -> list[str]:
    if any(cell["depth"] is not None for cell in cells):
        tasks = dict.fromkeys(cell["task"] for cell in cells)
        return [
            f"<h2>{escape(task)}</h2>" + _table([c for c in cells if c["task"] == task], "depth", "length", "tokens")
            for task in tasks
        ]
    return ["<h2>Tasks</h2>" + _table(cells, "task", "length", "tokens")] if cells else []


def _table(cells: Sequence[Cell], row_key: str, column_key: str, unit: str) -> str:
    rows, columns = list(dict.fromkeys(c[row_key] for c in cells)), sorted({c[column_key] for c in cells})
    if row_key == "depth":
        rows.sort()
    by_place = {(c[row_key], c[column_key]): c for c in cells}
    head = "".join(f"<th>{column:,} {unit}</th>" for column in columns)
    body = "".join(
        f"<tr><th>{escape(f'{row_key} {row:g}' if isinstance(row, float) else str(row))}</th>"
        + "".join(_cell(by_place.get((row, column))) for column in columns)
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr><th></th>{head}</tr>{body}</table></div>'


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    hue, word = 120 * cell["score"], f"{cell['score']:.0%}"
    note = "" if cell["outcome"] == FOUND else f"<br><small>{escape(str(cell.get('cause', cell['outcome'])))}</small>"
    title = escape(cell["tries"][0]["answer"][:200], quote=True)
    return f'<td class="cell" style="background: hsl({hue:.0f} 60% 70%)" title="{title}">{word}{note}</td>'


def _misses(cells: Sequence[Cell]) -> str:
    rows = [
        (cell, attempt) for cell in cells for attempt in cell["tries"] if attempt["outcome"] != FOUND
    ]  # every miss with what was wanted and what was said
    if not rows:
        return ""
    body = "".join(
        f'<tr><td class="text">{escape(cell["task"])}</td><td>{cell["length"]:,}</td>'
        f"<td>{'' if cell['depth'] is None else format(cell['depth'], 'g')}</td>"
        f'<td class="text">{escape(attempt["outcome"])}</td>'
        f'<td class="text">{escape(str(cell.get("cause", "")))}</td>'
        f'<td class="text">{escape(", ".join(attempt["facts"]))}</td>'
        f'<td class="text">{escape(attempt["answer"][:300])}</td></tr>'
        for cell, attempt in rows
    )
    head = "".join(f"<th>{name}</th>" for name in ("task", "tokens", "depth", "miss", "cause", "wanted", "answer"))
    return f'<h2>Misses</h2><div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _controls(report: Mapping[str, Any]) -> str:
    lines = [
        f"{c['task']} at {c['length']:,} tokens without its needle: {c['outcome']} ({c['answer'][:100]!r})"
        for c in report["controls"]
    ]
    for c in report["reference"]:
        depth = "" if c["depth"] is None else f", depth {c['depth']:g}"
        lines.append(
            f"{c['task']} at {c['length']:,} tokens{depth} by Hugging Face: {c['verdict']}, logprobs differ by "
            f"{c['max_logprob_difference']:.1e}"
        )
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>Controls</h2><p>They are not part of the score.</p><ul>{items}</ul>"
