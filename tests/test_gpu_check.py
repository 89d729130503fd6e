"""`make gpu-check` runs from a bare checkout: without installation, without web framework, gguf, typer or pytest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ABSENT = (
    "fastapi",
    "pydantic",
    "gguf",
    "typer",
    "rich",
    "uvicorn",
    "prometheus_client",
    "httpx",
    "pytest",
    "hypothesis",
)
"""What a machine with nothing but torch, triton, transformers and numba need not have."""

RUN = f"""
import importlib.machinery, runpy, sys
class Bare(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {ABSENT!r} else super().find_spec(name, path, target)
# Not the finder of an editable install, which knows `longctx`.
sys.meta_path[:] = [importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter, Bare]
runpy.run_path("tools/gpu_check.py", run_name="__main__")
"""


def gpu_check(*arguments: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN.replace(repr(ABSENT), repr(ABSENT + without)), *arguments],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_what_it_needs_and_lacks_it_says_in_one_line(tmp_path: Path) -> None:
    result = gpu_check("--out", str(tmp_path), without=("triton",))
    assert (result.returncode, result.stderr) == (2, "")
    assert result.stdout.startswith("gpu-check: missing triton;") and result.stdout.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_without_a_device_kernels_are_compiled_and_interpreted(tmp_path: Path) -> None:
    """Nothing else can be done there, and it says so."""
    result = gpu_check("--kernels", "merge", "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "NOTHING RAN ON A GPU" in result.stdout and " passed, 0 failed\n" in result.stdout
    rows = json.loads((tmp_path / "kernels.json").read_text())
    assert {row["arch"] for row in rows} == {80, 90, 100} and all(row["spills"] == 0 for row in rows)
    assert all(0 < row["registers"] < 256 and row["shared_bytes"] >= 0 and "merge" in row["kernel"] for row in rows)
    assert "rows" not in json.loads((tmp_path / "gpu-check.json").read_text())


@pytest.mark.slow
def test_every_check_passes_where_it_can_be_tried(tmp_path: Path) -> None:
    """The checks themselves, on the CPU: what they would say of a right device."""
    result = gpu_check("--device", "cpu", "--kernels", "blocks", "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith(" passed, 0 failed\n")
    report = json.loads((tmp_path / "gpu-check.json").read_text())
    assert report["limits"]["copy_bytes_per_s"] > 0
    assert {row["work"] for row in report["rows"]} == {"decode", "prefill"}
    assert all(row.get("bytes_per_s", row.get("flops_per_s")) > 0 for row in report["rows"])
