"""From a config to an engine: load the model, prepare its modules, size the pools, put the parts together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from longctx import machine
from longctx.config import CacheConfig, EngineConfig, LoadConfig
from longctx.engine import Engine, backends_for
from longctx.errors import EngineError, LongctxError
from longctx.events import FinishEvent
from longctx.kv.factors import KeyFactors
from longctx.kv.groups import LayerGroup, formats_text, make_groups
from longctx.kv.memory import Fixed, MemoryWords, check_machine, fixed_for, kv_memory_for
from longctx.kv.partition import Partition, PoolShape, ceil_div, partition
from longctx.kv.policy import FormatPolicy
from longctx.models.allow import ALLOWED, PROBE_TOKENS, verify_against_eager
from longctx.models.fused import fuse
from longctx.models.int8_linears import quantize_linears
from longctx.models.linears import pack_linears
from longctx.models.load import LoadedModel, load_model
from longctx.models.rotary import swap_rotary
from longctx.models.spec import INT8_WEIGHTS, ModelSpec
from longctx.params import SamplingParams
from longctx.rates import Rates, rates_for
from longctx.request import ScoreSheet
from longctx.resident import trim_heap
from longctx.variant import VariantConfig

log = logging.getLogger(__name__)

Progress = Callable[[str, float, float], None]


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load `config`'s model and build its engine. Raises the `LongctxError` family before a pool is allocated."""
    FormatPolicy.parse(config.cache.kv_format)
    backends_for(config, "cpu")
    load = config.load
    loaded = load_model(
        load.model,
        dtype=load.dtype,
        load_format=load.load_format,
        max_model_len=load.max_model_len,
        rope_scaling=load.rope_scaling,
        unverified=load.unverified_model,
        weights=load.weights,
        progress=progress,
    )
    loaded = _with_variant(loaded, config.variant)
    if loaded.spec.model_type not in ALLOWED:
        _check_comparable(config.variant)
    engine = assemble(config, loaded, rates_for(loaded.spec, formats_text(groups_for(config, loaded.spec))))
    if loaded.spec.model_type not in ALLOWED:
        verify_against_eager(loaded.model, lambda ids: torch.as_tensor(score_alone(engine, ids)))
    if progress is not None:
        progress("compiling kernels", 0, 1)
    engine.runner.warm_up()
    return engine


def build_beside(engine: Engine, options: Mapping[str, Any]) -> Engine:
    """An engine over the loaded model of another, with its config but for some `options`, and pools of its own.

    Raises `LongctxError` for an option that would load other weights or other arithmetic.
    """
    config = engine.config.changed(**options)
    if config.load != engine.config.load:
        names = [f.name for f in fields(LoadConfig) if f.name in options]
        raise LongctxError(f"{', '.join(names)} decides what is loaded: make a new LLM instead of one beside another")
    loaded = _with_variant(engine.loaded, config.variant)
    spec = loaded.spec
    beside = assemble(config, loaded, rates_for(spec, formats_text(groups_for(config, spec))))
    beside.runner.warm_up()
    return beside


def _with_variant(loaded: LoadedModel, variant: VariantConfig) -> LoadedModel:
    """The model whose spec says what its layers see when they are served so."""
    return replace(loaded, spec=variant.applied_to(loaded.spec))


def _check_comparable(variant: VariantConfig) -> None:
    """Refuse a variant under which an unverified model's comparison with Hugging Face would have to fail."""
    most = None if variant.reach is None else variant.reach.most
    if most is not None and most < PROBE_TOKENS:
        raise LongctxError(
            f"an unverified model is compared with Hugging Face on {PROBE_TOKENS} tokens, and {variant.key} sees "
            f"{most}: make it larger"
        )


def score_alone(engine: Engine, token_ids: Sequence[int]) -> np.ndarray:
    """Logits [n, V] of every position, computed by stepping an idle engine by hand; `EngineError` if a step fails."""
    sheet = ScoreSheet(want_logits=True)
    engine.submit(engine.make_request(token_ids, SamplingParams(max_tokens=1), score=sheet))
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, FinishEvent) and event.reason == "error":
                raise EngineError(event.error)
    return np.concatenate(sheet.logits)


def assemble(config: EngineConfig, loaded: LoadedModel, rates: Rates, *, kv_tokens: int | None = None) -> Engine:
    """An engine around a loaded model, whose modules are swapped for faster ones in place.

    `kv_tokens` sizes the pool by tokens of history instead of by the config's memory words.
    """
    spec, scheduler = loaded.spec, config.scheduler
    groups = groups_for(config, spec)
    for line in FormatPolicy.parse(config.cache.kv_format).idle(spec.layers):
        log.warning("%s", line)
    shape = PoolShape(
        groups, scheduler.max_running, scheduler.largest_chunk, spec.max_positions, config.cache.tail_every
    )
    fixed = fixed_for(spec, scheduler.largest_chunk, scheduler.max_running)
    if kv_tokens is None:
        part = size_pool(config.cache, shape, fixed)
    else:
        part = Partition(shape, ceil_div(kv_tokens, config.cache.block_tokens))
    swap_rotary(loaded.model, spec.rope)
    prepare = quantize_linears if spec.weights == INT8_WEIGHTS else pack_linears
    packed = prepare(loaded.model)
    if spec.weights == INT8_WEIGHTS and packed.reason:
        log.warning("--weights int8: %s", packed.reason)
    for report in (packed, fuse(loaded.model)):
        log.info("%s", report)
    trim_heap()
    factors = _key_factors(config.cache, spec, groups, loaded.model.device)
    return Engine(config, loaded, groups, part, fixed, rates, factors)


def _key_factors(
    cache: CacheConfig, spec: ModelSpec, groups: Sequence[LayerGroup], device: torch.device
) -> KeyFactors | None:
    """The config's key factors for the layers that they can help."""
    if cache.kv_factors is None:
        return None
    factors = KeyFactors.load(cache.kv_factors, spec.layers).for_lossy(groups, device)
    if factors is None:
        log.warning("the key factors %s are not used: all keys are stored exactly", cache.kv_factors)
    return factors


def size_pool(cache: CacheConfig, shape: PoolShape, fixed: Fixed) -> Partition:
    """The static partition of G1 under the config's memory words; refuses a pool that the machine cannot hold."""
    words = MemoryWords(cache.kv_memory, cache.device_memory, cache.memory_fraction)
    most = shape.roomy_bytes(shape.max_model_len, shape.max_running)
    kv_memory = kv_memory_for(words, fixed, machine.available_bytes(), most)
    check_machine(words, fixed, kv_memory, machine.physical_bytes())
    return partition(
        shape.groups,
        kv_memory,
        shape.max_running,
        shape.max_chunk_tokens,
        shape.max_model_len,
        shape.tail_every,
    )


def groups_for(config: EngineConfig, spec: ModelSpec) -> tuple[LayerGroup, ...]:
    """The layer groups of an engine of `config`, whose formats are those of the config's policy."""
    return make_groups(spec, config.cache.block_tokens, FormatPolicy.parse(config.cache.kv_format))
