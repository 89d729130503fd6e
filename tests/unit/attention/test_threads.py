"""Decode gives the same bits on any number of threads, and on whichever threads it gets."""

from __future__ import annotations

import pytest
import torch

from longctx.attention.kernels import omp, sdpa
from longctx.attention.numba_backend import NumbaBackend
from longctx.attention.span import AttnParams
from longctx.attention.torch_backend import TorchBackend
from tests.helpers.attention import assert_close, assert_same_bits, decode, prefill, random_sequence


@pytest.fixture(params=["torch's pool", "own pool"])
def threads(request, monkeypatch):
    """Runs a function with n threads of torch's OpenMP pool, or of ours where torch was built with another."""
    if request.param == "own pool":
        monkeypatch.setattr(omp, "_torch_parallel", lambda: None)
    elif omp._torch_parallel() is None:
        pytest.skip("this torch is not linked with GNU OpenMP")
    before = torch.get_num_threads()

    def run(num_threads, function):
        torch.set_num_threads(num_threads)
        try:
            return function()
        finally:
            torch.set_num_threads(before)

    return run


def test_decode_is_the_same_on_any_number_of_threads(threads):
    sequence = random_sequence(2500, 3, 16)
    positions = [0, 700, 2499]
    q_RHD = torch.randn(3, 9, 16)
    backend = NumbaBackend()
    for window in (None, 300):
        params = AttnParams(0.25, window)
        alone = decode(backend, q_RHD, positions, sequence, params)
        for num_threads in (2, 3, 2):
            several = threads(num_threads, lambda params=params: decode(backend, q_RHD, positions, sequence, params))
            assert_same_bits(several, alone)


def test_prefill_where_the_fused_kernel_does_not_share_kv_heads(monkeypatch):
    """Older torch: kv heads are repeated before the call, with the same result."""
    sequence = random_sequence(300, 3, 16)
    q_THD = torch.randn(300, 9, 16)
    expected = prefill(TorchBackend(), q_THD, 0, sequence, AttnParams(0.25))
    monkeypatch.setattr(sdpa, "_flash_shares_kv_heads", lambda: False)
    assert_close(prefill(TorchBackend(), q_THD, 0, sequence, AttnParams(0.25)), expected, 1e-6)
