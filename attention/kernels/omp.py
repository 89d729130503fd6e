"""Running a C function on all of torch's threads."""

# A decode step alternates torch's linears with our attention. GNU OpenMP's threads spin for a while after a parallel
# region, so a second pool (numba's, or threads of our own) would find the other core taken each time. Entering a region
# of the same pool instead finds its threads awake. Between linears, on two busy cores, best of 48: 512 keys of 4 heads
# of 256 take 112 us here, 260 us on threads of our own, 166 us on one thread; smollm2's 8K keys 524, 1075 and 845 us.
from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

_C_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _torch_parallel() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel(function, argument, num_threads, flags)` of the very OpenMP library torch is linked with."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).GOMP_parallel  # looked up in the library's own dependencies
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


@cache
def _own_pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="longctx-attention")


def run_on_threads(function: int, argument: int, num_threads: int) -> None:
    """Call the C function at address `function` with `argument` once on each of `num_threads` threads, and wait."""
    if num_threads == 1:
        _C_FUNCTION(function)(argument)
        return
    parallel = _torch_parallel()
    if parallel is not None:
        parallel(function, argument, num_threads, 0)
        return
    call = _C_FUNCTION(function)
    others = [_own_pool(num_threads - 1).submit(call, argument) for _ in range(num_threads - 1)]
    call(argument)
    for other in others:
        other.result()
