"""Settings every test shares: no network, few threads (the machine is small), fixed seeds."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import random

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter then. It chooses when it is imported, and parts of torch import it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
