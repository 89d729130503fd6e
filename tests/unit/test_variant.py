"""What a user may choose of attention variants, what is refused, and what becomes of a model's layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longctx.attention.reach import Reach
from longctx.config import EngineConfig
from longctx.errors import LongctxError
from longctx.kv.groups import make_groups
from longctx.kv.partition import PoolShape
from longctx.kv.policy import FormatPolicy
from longctx.kv.sizes import request_bytes
from longctx.models.spec import ModelSpec
from longctx.variant import VariantConfig
from tests.helpers.spec import make_spec


def variant_of(**options: object) -> VariantConfig:
    return EngineConfig.from_options("m", **options).variant


def hybrid() -> ModelSpec:
    spec = make_spec()
    return replace(spec, layers=(replace(spec.layers[0], window=32), spec.layers[1]))


def test_defaults_and_words() -> None:
    assert variant_of() == VariantConfig() and variant_of().reach is None and variant_of().key == "exact"
    assert variant_of(attention_variant="streaming").reach == Reach(4096, 4)
    streaming = variant_of(attention_variant="streaming", window="8K", sinks=0)
    assert streaming.reach == Reach(8192) and streaming.key == "streaming-w8192-s0"
    assert variant_of(attention_variant="local-chunk").reach == Reach(local_chunk=8192)
    assert variant_of(attention_variant="local-chunk", local_chunk=100).key == "local-chunk-c100"
    assert "lossy" in str(streaming) and "8,192" in str(streaming)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_variant": "sparse"}, "'sparse' is unknown; choose exact, streaming, local-chunk"),
        ({"attention_variant": "streaming", "window": 0}, "window must be .* at least 1, got 0"),
        ({"attention_variant": "streaming", "window": 4.5}, "window must be a whole number"),
        ({"attention_variant": "streaming", "sinks": -1}, "sinks must be .* at least 0, got -1"),
        ({"attention_variant": "streaming", "window": 8, "sinks": 8}, "sinks 8 must be fewer than the window's 8"),
        ({"attention_variant": "streaming", "window": 4}, "sinks 4 must be fewer than the window's 4"),
        ({"attention_variant": "local-chunk", "local_chunk": 0}, "local_chunk must be .* at least 1, got 0"),
        ({"window": 512}, "window 512 goes with the attention variant streaming"),
        ({"sinks": 4, "attention_variant": "local-chunk"}, "sinks 4 goes with the attention variant streaming"),
        ({"local_chunk": 4, "attention_variant": "streaming"}, "local_chunk 4 goes with .* local-chunk"),
    ],
)
def test_nonsense_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(LongctxError, match=message):
        variant_of(**options)


def test_full_layers_change_and_windows_stay() -> None:
    spec, streaming = hybrid(), VariantConfig("streaming", 100, 4)
    served = streaming.applied_to(spec)
    assert [layer.reach for layer in served.layers] == [Reach(32), Reach(100, 4)]
    assert [layer.by_variant for layer in served.layers] == [False, True]
    # Another engine over the same model: the variant before is taken back.
    assert VariantConfig().applied_to(served) == spec
    assert VariantConfig("local-chunk", local_chunk=64).applied_to(served).layers[1].reach == Reach(local_chunk=64)
    assert streaming.applied_to(served) == served


def test_a_variant_that_changes_nothing_is_refused() -> None:
    windows = replace(hybrid(), layers=(hybrid().layers[0],))
    with pytest.raises(LongctxError, match="no layer has full attention"):
        VariantConfig("streaming", 100, 4).applied_to(windows)
    with pytest.raises(LongctxError, match=r"has 4,096 positions and .* sees 4,100, so it changes nothing"):
        VariantConfig("streaming", 4096, 4).applied_to(make_spec())
    with pytest.raises(LongctxError, match="so it changes nothing"):
        VariantConfig("local-chunk", local_chunk=4096).applied_to(make_spec())


def test_layers_share_a_pool_only_if_they_see_alike() -> None:
    spec = VariantConfig("streaming", 32, 4).applied_to(hybrid())
    sinks = make_groups(spec, 16, FormatPolicy.parse("fp32"))
    assert [(g.key.mask_kind, g.layers) for g in sinks] == [("window", (0,)), ("sinks", (1,))]
    token = 2 * 2 * 16 * 4  # K and V, heads, dims, bytes
    assert request_bytes(sinks, 1000) == (32 * token + 36 * token, 0)
    assert request_bytes(sinks, 34) == (32 * token + 34 * token, 0)
    # Nothing is full any more: a thousand times the tokens need the same pool.
    shapes = [PoolShape(sinks, 2, 64, tokens) for tokens in (10**4, 10**7)]
    assert not shapes[0].has_full and len({shape.bytes_for(shape.max_model_len, 2) for shape in shapes}) == 1
