"""Which backends exist, and which a device uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from longctx.attention.backend import Backend
from longctx.attention.numba_backend import NumbaBackend
from longctx.attention.span import TILE_TOKENS
from longctx.attention.torch_backend import TorchBackend


def _triton_backend() -> Backend:
    # Triton is a GPU's: importing longctx on a CPU must neither need it nor pay for it.
    from longctx.attention.kernels import merge_triton
    from longctx.attention.triton_backend import TritonBackend
    from longctx.quant import store_triton

    store_triton.install()
    merge_triton.install()
    return TritonBackend()


def _with_flash(rest: Backend, device: torch.device | str) -> Backend:
    from longctx.attention.flash_backend import with_flash

    return with_flash(rest, device)


BACKENDS: dict[str, Callable[[], Backend]] = {
    "torch": TorchBackend,
    "numba": NumbaBackend,
    "triton": _triton_backend,
}
"""Every backend by name; tests/unit/attention/test_backend_contract.py holds each to the promises of `Backend`."""

CUDA_SPAN_TOKENS = 16384
"""Spans of kernels that read a block table themselves: long, for every span costs a pass over the queries to merge."""


@dataclass(frozen=True)
class Backends:
    """What computes chunks of prompts, what computes one token per sequence, and the tile that spans are cut at.

    With `decode` None, decoded tokens take the prefill backend too, so that their bits are those of a recomputation.
    """

    prefill: Backend
    decode: Backend | None
    span_tokens: int = TILE_TOKENS


def why_unavailable(name: str, device: torch.device | str) -> str | None:
    """Why the backend `name` cannot compute on `device`, in words for a user; None if it can."""
    device = torch.device(device)
    if name == "numba" and device.type != "cpu":
        return f"it computes on CPUs, the model is on {device}"
    if name != "triton":
        return None
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"it needs compute capability 8.0, {device} has {major}.{minor}"
    # The interpreter is chosen when triton is imported.
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"it needs a CUDA device, the model is on {device} (TRITON_INTERPRET=1 tries the kernels on a CPU, slowly)"


def pick_backends(device: torch.device | str, name: str = "auto") -> Backends:
    """The backends called `name` for pools on `device`; "auto": the fastest that are there.

    Those that need a special pool fall back within themselves. Raises `ValueError`, naming the remedy, where the device
    has no such backend.
    """
    fastest = name == "auto"
    if fastest:
        if torch.device(device).type == "cpu":
            name = "numba"
        else:
            name = "torch" if why_unavailable("triton", device) else "triton"
    elif name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    reason = why_unavailable(name, device)
    if reason is not None:
        raise ValueError(f"attention {name!r} is not available: {reason}; auto takes what is")
    if name == "numba":
        prefill = TorchBackend()
        return Backends(prefill, NumbaBackend(prefill))
    backend = BACKENDS[name]()
    if name == "torch":
        return Backends(backend, backend)
    return Backends(_with_flash(backend, device) if fastest else backend, backend, CUDA_SPAN_TOKENS)
