"""Memory that this process gives back."""

from __future__ import annotations

import ctypes

import psutil
import pytest
import torch

from longctx.resident import trim_heap


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="a C library without malloc_trim")
def test_freed_pages_between_living_blocks_are_given_back() -> None:
    """B141: what a chunk's tensors leave behind in the heap is counted by nobody (vllm-project/vllm#7256)."""
    process = psutil.Process()
    blocks = [torch.ones(25_000) for _ in range(800)]  # 100 kB each: from the heap, not mapped one by one
    del blocks[::2]
    before = process.memory_info().rss
    trim_heap()
    assert before - process.memory_info().rss > 20_000_000
    assert all(block[-1] == 1.0 for block in blocks)
