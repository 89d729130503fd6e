"""Planned bytes are the bytes that the pools allocate."""

from __future__ import annotations

import pytest

from tests.helpers.engine import make_engine
from tests.helpers.tiny import make_tiny


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mistral", "phi3_longrope"])
@pytest.mark.parametrize("block_tokens", [16, 32])
def test_planned_pool_bytes_are_those_of_the_storage(kind: str, block_tokens: int) -> None:
    """To the byte: rounding, alignment and null blocks included, for full, hybrid and window-only models."""
    engine = make_engine(make_tiny(kind), block_tokens=block_tokens, kv_tokens=1000, max_running=3)
    allocated = sum(pool.untyped_storage().nbytes() for pool in engine.runner.storage.pools)
    assert engine.partition.pool_bytes == allocated
    assert engine.plan(500).pool_bytes == allocated
