"""A whole engine on a CUDA device, beside Hugging Face on the same device."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.gpu_checks import ENGINE_KINDS, check_engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("kind", ENGINE_KINDS)
def test_an_engine_on_cuda_has_the_logits_of_hugging_face(kind: str) -> None:
    check_engine(kind, "cuda")
