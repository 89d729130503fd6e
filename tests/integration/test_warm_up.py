"""What a format needs is compiled at start, so that no request waits for a compiler."""

from __future__ import annotations

import pytest

from longctx.attention.kernels.decode_numba import decode_kernel
from longctx.quant import cpu_store
from tests.helpers.engine import generate, make_engine
from tests.helpers.tiny import make_tiny, random_ids

CACHES = (decode_kernel, cpu_store._store_kernel, cpu_store._gather_kernel)


@pytest.mark.parametrize("kv_format", ["int8", "k:int8,v:int4"])
def test_warming_up_compiles_what_the_formats_need(kv_format) -> None:
    engine = make_engine(make_tiny("gemma3_text"), kv_format=kv_format)
    for found in CACHES:
        found.cache_clear()
    engine.runner.warm_up()
    warm = [found.cache_info().misses for found in CACHES]
    assert all(warm)
    generate(engine, random_ids(600), 4, ignore_eos=True)
    assert [found.cache_info().misses for found in CACHES] == warm
