"""Which backends exist, and which a device uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from longctx.attention.backend import Backend
from longctx.attention.numba_backend import NumbaBackend
from longctx.attention.torch_backend import TorchBackend

BACKENDS: dict[str, Callable[[], Backend]] = {"torch": TorchBackend, "numba": NumbaBackend}
"""Every backend by name; tests/unit/attention/test_backend_contract.py holds each to the promises of `Backend`."""


@dataclass(frozen=True)
class Backends:
    """What computes chunks of prompts, and what computes one token per sequence.

    With `decode` None, decoded tokens take the prefill backend too, so that their bits are those of a recomputation.
    """

    prefill: Backend
    decode: Backend | None


def pick_backends(device: torch.device | str) -> Backends:
    """The fastest backends for pools on `device`. Those that need a special pool fall back within themselves."""
    prefill = TorchBackend()
    if torch.device(device).type == "cpu":
        return Backends(prefill, NumbaBackend(prefill))
    return Backends(prefill, prefill)
