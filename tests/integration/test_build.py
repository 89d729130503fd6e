"""From a folder to an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longctx.attention.span import AttnParams
from longctx.build import build_engine
from longctx.config import EngineConfig
from longctx.errors import ModelError
from tests.helpers.engine import generate
from tests.helpers.tiny import make_tiny, random_ids


def test_a_built_engine_is_warm_and_empty(tmp_path) -> None:
    """Warming up leaves no slot held or cached, and changes no answer."""
    for kind in ("llama", "gemma3_text"):
        folder = tmp_path / kind
        make_tiny(kind, peaky=True).save_pretrained(folder)
        engine = build_engine(EngineConfig.from_options(str(folder), block_tokens=16, kv_memory="64MiB"))
        assert all(stats.held == stats.cached == 0 for stats in engine.cache_stats())
        logits = []
        for pool in engine.runner.storage.pools:
            pool.view(torch.float32)[: pool.numel() // 8].fill_(float("nan"))
        logits.append(generate(engine, random_ids(40), 4, ignore_eos=True).token_ids)
        engine.cache.clear()
        engine.runner.warm_up()
        logits.append(generate(engine, random_ids(40), 4, ignore_eos=True).token_ids)
        assert logits[0] == logits[1]


def test_an_unverified_type_is_compared_at_load(tmp_path, monkeypatch) -> None:
    """A type outside the allow-list runs when its logits are Hugging Face's, and is refused when they are not."""
    monkeypatch.setattr("longctx.models.allow.ALLOWED", frozenset())
    monkeypatch.setattr("longctx.build.ALLOWED", frozenset())
    make_tiny("llama", peaky=True).save_pretrained(tmp_path)
    config = EngineConfig.from_options(str(tmp_path), unverified_model=True, kv_memory="64MiB")
    assert build_engine(config).has_work is False

    def sharper(scale: float, *others: Any) -> AttnParams:
        return AttnParams(1.1 * scale, *others)

    monkeypatch.setattr("longctx.forward.AttnParams", sharper)
    with pytest.raises(ModelError, match="logits differ"):
        build_engine(config)
