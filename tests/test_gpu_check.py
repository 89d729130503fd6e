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


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_a_device_it_says_so_in_one_line(tmp_path: Path) -> None:
    """Everything it needs was imported before that: the packages a GPU machine lacks are not among it."""
    result = gpu_check("--out", str(tmp_path))
    assert (result.returncode, result.stderr) == (2, "")
    assert result.stdout == "gpu-check: there is no CUDA device here, so nothing was checked\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_every_check_passes_where_it_can_be_tried(tmp_path: Path) -> None:
    """The checks themselves, on the CPU: what they would say of a right device."""
    result = gpu_check("--device", "cpu", "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith(" passed, 0 failed\n")
    assert json.loads((tmp_path / "kernels.json").read_text()) == []
    figures = json.loads((tmp_path / "gpu-check.json").read_text())["attention"]
    assert 0 < figures["share_of_copy"] < 1 and figures["prefill_flops_per_s"] > 0
