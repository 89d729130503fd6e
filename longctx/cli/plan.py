"""`longctx plan`: before anything is loaded, whether a context fits, what it takes and how long it will be."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from longctx.cli.options import ChunkTokens, DeviceMemory, DType, KVFormat, KVMemory, MaxModelLen, RopeScaling, Weights
from longctx.cli.variant import LocalChunk, Sinks, Variant, Window, variant_options
from longctx.errors import LongctxError
from longctx.units import format_bytes, format_seconds, format_tokens, parse_bytes, parse_rate, parse_tokens
from longctx.variant import VariantConfig

if TYPE_CHECKING:
    from longctx.kv.budget import Plan, TierSpec
    from longctx.kv.groups import LayerGroup
    from longctx.kv.memory import MemoryWords
    from longctx.models.spec import ModelSpec

log = logging.getLogger(__name__)

_GEOMETRY_LIMITS = {"layers": 10_000, "kv_heads": 10_000, "head_dim": 10_000, "window": 2**40, "window_layers": 10_000}
_GEOMETRY_EXAMPLE = "layers=80,kv_heads=8,head_dim=128"
_TIER_NAME = re.compile("g[1-4]")


@dataclass(frozen=True)
class Subject:
    """What is planned for: the groups and, if it is a model, its spec and what is known of its formats' damage."""

    title: str
    groups: tuple[LayerGroup, ...]
    weight_bytes: int
    spec: ModelSpec | None
    variant: VariantConfig = field(default_factory=VariantConfig)
    drift: str | None = None


def plan(
    tokens: Annotated[str, typer.Option(metavar="N,...", help="lengths, prompt + generated, such as 128K,1M")],
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="built-in name, folder, .gguf file or hub id")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="requests of that length at the same time")] = 1,
    geometry: Annotated[
        str | None, typer.Option(metavar="KEY=N,...", help=f"instead of MODEL, such as {_GEOMETRY_EXAMPLE}")
    ] = None,
    weight_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="with --geometry: weights and buffers, such as 140GB")
    ] = None,
    kv_format: KVFormat = "auto",
    variant: Variant = "exact",
    window: Window = None,
    sinks: Sinks = None,
    local_chunk: LocalChunk = None,
    kv_memory: KVMemory = None,
    device_memory: DeviceMemory = None,
    memory_fraction: Annotated[float | None, typer.Option(help="the pool's share of what the rest leaves")] = None,
    chunk_tokens: ChunkTokens = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SPEED[,SIZE]", help="a tier's speed and capacity, such as g2=25GB/s,64GiB; again"),
    ] = None,
    max_model_len: MaxModelLen = None,
    rope_scaling: RopeScaling = None,
    dtype: DType = "auto",
    weights: Weights = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Say whether a context fits, to the byte, how long its prefill takes, and the smallest change that makes it fit.

    Reads a config and no weights. Without a memory option it plans for this machine. A refusal is an answer: exit 0.
    """
    lengths = [parse_tokens(part, "--tokens") for part in tokens.split(",")]
    if concurrency < 1:
        raise LongctxError(f"--concurrency {concurrency} must be at least 1")
    chunk = None if chunk_tokens is None else parse_tokens(chunk_tokens, "--chunk-tokens")
    tiers = parse_tiers(tier or ())
    parts = parse_geometry(geometry) if geometry is not None else None
    if (model is None) == (parts is None):
        raise LongctxError(f"give either a MODEL or --geometry {_GEOMETRY_EXAMPLE}")
    if variant != "exact" and parts is not None:
        raise LongctxError(f"--variant {variant} goes with a MODEL; a geometry's layers have window=N")
    if weight_bytes is not None and parts is None:
        raise LongctxError(f"--weight-bytes {weight_bytes} goes with --geometry; a model has its own")

    from longctx.kv.memory import MemoryWords

    words = MemoryWords.parse(kv_memory, device_memory, memory_fraction)
    if parts is not None:
        subject = _geometry_subject(parts, kv_format, parse_bytes(weight_bytes or 0, "--weight-bytes"))
    else:
        limit = None if max_model_len is None else parse_tokens(max_model_len, "--max-model-len")
        choice = VariantConfig(**variant_options(variant, window, sinks, local_chunk))
        subject = _model_subject(str(model), kv_format, dtype, weights, limit, rope_scaling, choice)
    plans = make_plans(subject, lengths, concurrency, words, chunk, tiers)
    if as_json:
        objects = [each.to_json() for each in plans]
        print(json.dumps(objects[0] if len(objects) == 1 else {"plans": objects}))
    else:
        _print_table(subject, plans)


def make_plans(
    subject: Subject,
    lengths: Sequence[int],
    concurrency: int,
    words: MemoryWords,
    chunk_tokens: int | None = None,
    tiers: Sequence[TierSpec] = (),
) -> list[Plan]:
    """One plan per length, each for an engine started for just that: `concurrency` running requests of that length."""
    from longctx import machine
    from longctx.config import SchedulerConfig
    from longctx.kv.budget import Demand, PoolShape
    from longctx.kv.budget import plan as plan_one
    from longctx.kv.groups import formats_text
    from longctx.kv.memory import Fixed, fixed_for, kv_limit, kv_memory_for
    from longctx.rates import rates_for

    spec, max_chunk = subject.spec, chunk_tokens or SchedulerConfig.max_chunk_tokens
    fixed, rates = Fixed(subject.weight_bytes), None
    if spec is not None:
        fixed, rates = fixed_for(spec, max_chunk, concurrency), rates_for(spec, formats_text(subject.groups))
    available = machine.available_bytes()
    plans = []
    for tokens in lengths:
        need = PoolShape(subject.groups, concurrency, max_chunk, tokens).bytes_for(tokens, concurrency)
        plans.append(
            plan_one(
                Demand(tokens, concurrency),
                subject.groups,
                kv_limit(words, fixed, available),
                kv_memory=kv_memory_for(words, fixed, available, need),
                fixed=fixed,
                chunk_tokens=chunk_tokens,
                max_chunk_tokens=max_chunk,
                max_positions=None if spec is None else spec.max_positions,
                tiers=tiers,
                rates=rates,
                attention_variant=subject.variant.key,
            )
        )
    return plans


def _model_subject(
    name: str,
    kv_format: str,
    dtype: str,
    weights: str,
    max_model_len: int | None,
    rope_scaling: str | None,
    variant: VariantConfig,
) -> Subject:
    from longctx.config import CacheConfig
    from longctx.drift_note import NoteKey, drift_line
    from longctx.kv.groups import formats_text, make_groups
    from longctx.kv.policy import FormatPolicy
    from longctx.models.load import known_digest, load_config_only

    policy = FormatPolicy.parse(kv_format)
    config, spec = load_config_only(
        name, dtype=dtype, max_model_len=max_model_len, rope_scaling=rope_scaling, weights=weights
    )
    spec = variant.applied_to(spec)
    held = "" if spec.weights == "plain" else f", weights in {spec.weights}"
    groups = make_groups(spec, CacheConfig.block_tokens, policy)
    for line in policy.idle(spec.layers):
        log.warning("%s", line)
    stored = formats_text(groups)
    drift = drift_line(NoteKey(known_digest(name, config), name, stored, spec.weights, variant.key))
    return Subject(f"{name} in {spec.dtype}{held}, KV in {stored}", groups, spec.weight_bytes, spec, variant, drift)


def _geometry_subject(parts: dict[str, int], kv_format: str, weight_bytes: int) -> Subject:
    """A bare geometry; its format is 16 bits wide unless given."""
    from longctx.config import CacheConfig
    from longctx.kv.groups import formats_text
    from longctx.kv.policy import FormatPolicy
    from longctx.kv.sizes import geometry_groups
    from longctx.quant.formats import FORMATS

    groups = geometry_groups(
        kv_format=FORMATS["bf16"],
        block_tokens=CacheConfig.block_tokens,
        policy=FormatPolicy.parse(kv_format),
        **parts,
    )
    shown = ", ".join(f"{key} {value}" for key, value in parts.items())
    return Subject(f"{shown}, KV in {formats_text(groups)}", groups, weight_bytes, None)


def parse_geometry(text: str) -> dict[str, int]:
    """ "layers=80,kv_heads=8,head_dim=128[,window=512][,window_layers=15]" as numbers; raises `LongctxError`."""
    parts: dict[str, int] = {}
    for item in text.split(","):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or key not in _GEOMETRY_LIMITS or key in parts:
            raise LongctxError(f"--geometry {item.strip()!r} is not understood: write {_GEOMETRY_EXAMPLE}")
        parts[key] = parse_tokens(value, f"--geometry {key}")
        if parts[key] > _GEOMETRY_LIMITS[key]:
            raise LongctxError(f"--geometry {key}={value} is more than {_GEOMETRY_LIMITS[key]:,}")
    if missing := [key for key in ("layers", "kv_heads", "head_dim") if key not in parts]:
        raise LongctxError(f"--geometry {text!r} lacks {' and '.join(missing)}: write {_GEOMETRY_EXAMPLE}")
    if "window_layers" in parts and ("window" not in parts or parts["window_layers"] > parts["layers"]):
        raise LongctxError(
            f"--geometry window_layers={parts['window_layers']} needs a window and at most layers={parts['layers']}"
        )
    return parts


def parse_tiers(texts: Sequence[str]) -> list[TierSpec]:
    """Each "g2=25GB/s" or "g2=25GB/s,64GiB", ordered by name; raises `LongctxError`."""
    from longctx.kv.budget import TierSpec

    tiers: dict[str, TierSpec] = {}
    for text in texts:
        name, _, rest = (piece.strip() for piece in text.partition("="))
        speed, comma, capacity = rest.partition(",")
        if not _TIER_NAME.fullmatch(name) or not speed:
            raise LongctxError(f"--tier {text!r} is not understood: write g2=900GB/s or g2=900GB/s,64GiB (g1 to g4)")
        if name in tiers:
            raise LongctxError(f"--tier {name} is given twice: give each tier once")
        room = parse_bytes(capacity, f"--tier {name}") if comma else None
        tiers[name] = TierSpec(name, parse_rate(speed, f"--tier {name}"), room)
    return [tiers[name] for name in sorted(tiers)]


def _print_table(subject: Subject, plans: Sequence[Plan]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table(title=subject.title, title_justify="left")
    table.add_column("")
    for each in plans:
        times = f" x {each.concurrency}" if each.concurrency > 1 else ""
        table.add_column(f"{format_tokens(each.tokens)}{times}", justify="right")
    for label, cells in zip(_rows(plans[0]), zip(*(_rows(each).values() for each in plans), strict=True), strict=True):
        table.add_row(label, *cells)
    console.print(table)
    if subject.variant.reach is not None:
        console.print(f"attention {subject.variant}", markup=False)
    if subject.drift is not None:
        console.print(subject.drift, markup=False)
    for each in plans:
        if each.remedy is not None:
            console.print(f"{format_tokens(each.tokens)} tokens: {each.remedy}", markup=False)


def _rows(plan: Plan) -> dict[str, str]:
    """The table's cells of one plan, by label; every plan of one call has the same labels."""
    fit = "any" if plan.tokens_that_fit is None else format_tokens(plan.tokens_that_fit)
    rows = {
        "verdict": plan.verdict.replace("_", " "),
        "KV per token": format_bytes(plan.bytes_per_token),
        "KV": format_bytes(plan.kv_bytes),
        "KV scales": format_bytes(plan.scale_bytes),
        "weights": format_bytes(plan.weight_bytes),
        "workspace": format_bytes(plan.workspace_bytes),
        "process": format_bytes(plan.process_bytes),
        "pool": format_bytes(plan.pool_bytes),
        "peak": format_bytes(plan.peak_bytes),
        "least pool": format_bytes(plan.min_kv_bytes),
        "most for the pool": format_bytes(plan.kv_limit_bytes),
        "tokens that fit": fit,
        "in whole blocks": format_tokens(plan.pool_tokens),
        "requests that fit": format_tokens(plan.requests_that_fit),
        "chunks": f"{plan.num_chunks:,}, the last of {plan.last_chunk_tokens:,}",
    }
    for name, tier in plan.tiers.items():
        if tier.get("break_even_tokens_per_s") is not None:
            load, speed = float(tier["load_ms"] or 0), float(tier["break_even_tokens_per_s"] or 0)
            rows[f"load from {name}"] = format_seconds(load / 1e3)
            rows[f"{name} beats prefill below"] = f"{speed:,.0f} tokens/s"
    if plan.seconds is not None:
        low, high = (format_seconds(plan.seconds[end]) for end in ("low", "high"))
        rows["prefill"] = f"{low} to {high}"
    return rows
