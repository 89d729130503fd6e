"""A whole engine on a CUDA device, beside Hugging Face on the same device."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.gpu_checks import ENGINE_KINDS, LOSSY_ENGINES, check_engine, check_lossy_engine, gpu_backends

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BACKENDS = gpu_backends("cuda") if torch.cuda.is_available() else ["torch"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ENGINE_KINDS)
def test_an_engine_on_cuda_has_the_logits_of_hugging_face(kind: str, backend: str) -> None:
    check_engine(kind, backend, "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "fmt"), LOSSY_ENGINES)
def test_a_lossy_cache_is_what_it_is_on_the_cpu(kind: str, fmt: str, backend: str) -> None:
    check_lossy_engine(kind, fmt, backend, "cuda")
