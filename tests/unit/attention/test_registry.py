"""Choosing a backend: by name or by device, and one clear line where it is not there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from longctx.attention import registry
from longctx.attention.registry import pick_backends
from longctx.build import build_engine
from longctx.config import EngineConfig
from longctx.errors import LongctxError


def names(attention: str) -> tuple[str, str | None]:
    backends = pick_backends("cpu", attention)
    return backends.prefill.name, backends.decode and backends.decode.name


def test_a_cpu_has_torch_and_numba() -> None:
    assert names("auto") == names("numba") == ("torch", "numba")
    assert names("torch") == ("torch", "torch")


def test_triton_without_a_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="'triton' is not available: it needs a CUDA device, the model is on cpu"):
        pick_backends("cpu", "triton")


def test_triton_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="triton is not installed: pip install triton"):
        pick_backends("cpu", "triton")


@pytest.mark.parametrize(("attention", "said"), [("flash3", "known: auto, torch, numba, triton"), ("triton", "CUDA")])
def test_refused_before_a_model_is_looked_for(attention: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(LongctxError, match=said):
        build_engine(EngineConfig.from_options("no-such-model", attention=attention))


def test_a_cpu_does_not_import_triton() -> None:
    code = (
        "import sys; from longctx.attention.registry import pick_backends; pick_backends('cpu'); "
        "print([name for name in sys.modules if 'triton_backend' in name or name.endswith('_triton')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
