"""The tutorial's notebooks run from top to bottom, and what they show was shown by them."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MINUTES = 10

SMALLER: dict[str, dict[str, str]] = {
    "2-a-first-long-job": {"= 8192 //": "= 2048 //", "> 7_000": "> 1_500"},
    "3-prompt-layout-and-routing": {
        "range(3000)": "range(960)",
        "behind == 3000 and round(behind / 3040, 3) == 0.987": "behind == 960",
    },
    "4-a-needle-heatmap": {
        "--lengths 512,1K,2K --depths 0,0.25,0.5,0.75,1": "--lengths 512 --depths 0,1",
        '(report["cells"]) == 15': '(report["cells"]) == 2',
    },
}
"""What a test changes in a notebook: the same on shorter prompts. The stored outputs are those of the whole."""


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks() -> None:
    assert [path.name[0] for path in NOTEBOOKS] == [str(i + 1) for i in range(len(NOTEBOOKS))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_reader_sees_results_and_a_picture(path: Path) -> None:
    """Readers see the stored outputs, so they must be there, from one run in order, and without errors or warnings."""
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == [i + 1 for i in range(len(cells))]
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_own_assertions_hold(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    for whole, smaller in SMALLER.get(path.stem, {}).items():
        (cell,) = (cell for cell in code_cells(notebook) if whole in cell.source)
        cell.source = cell.source.replace(whole, smaller)
    NotebookClient(notebook, timeout=60 * MINUTES, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any("assert " in cell.source for cell in code_cells(notebook)), "a notebook that checks nothing"
