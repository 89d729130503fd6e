"""Triton's kernels: on a GPU if there is one, else in the interpreter, which tests/conftest.py has chosen."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:  # there is none for this platform
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels' tensors lie."""
    return "cuda" if torch.cuda.is_available() else "cpu"
