"""The attention backends' contract on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.gpu_checks import ATTENTION_CASES, check_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_on_cuda_is_attention(case) -> None:
    check_attention(case, "cuda")
