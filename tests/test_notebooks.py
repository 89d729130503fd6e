"""The tutorial's notebooks run from top to bottom, and what they show was shown by them."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MINUTES = 10


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
    NotebookClient(notebook, timeout=60 * MINUTES, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any("assert " in cell.source for cell in code_cells(notebook)), "a notebook that checks nothing"
