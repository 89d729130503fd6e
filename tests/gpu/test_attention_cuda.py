"""The attention backends' contract on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from longctx.quant.formats import FORMATS
from tests.helpers.gpu_checks import ATTENTION_CASES, check_attention, check_merge, check_storage, gpu_backends

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BACKENDS = gpu_backends("cuda") if torch.cuda.is_available() else ["torch"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_on_cuda_is_attention(case, backend: str) -> None:
    check_attention(case, backend, "cuda")


@pytest.mark.parametrize("fmt", FORMATS)
def test_kernels_store_what_the_codecs_store(fmt: str) -> None:
    check_storage(fmt, "cuda")


def test_states_merge() -> None:
    check_merge("cuda")
