"""All settings of an engine, frozen and composed; "auto" is resolved by functions that return a new config."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any

from longctx.errors import LongctxError
from longctx.models.spec import check_weights
from longctx.units import parse_bytes, parse_tokens
from longctx.variant import VariantConfig


def _check_whole(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, Integral):
            raise LongctxError(f"{name} must be a whole number, got {value!r}")
        if int(value) < 1:
            raise LongctxError(f"{name} must be positive, got {value}")


@dataclass(frozen=True)
class LoadConfig:
    """Which model, and how it is loaded.

    `weights` "int8" holds the linears' weights in int8 and quantizes what they multiply as it comes (on a CPU); "auto"
    holds them in `dtype`.
    """

    model: str
    dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    rope_scaling: str | None = None
    unverified_model: bool = False
    weights: str = "auto"

    def __post_init__(self) -> None:
        check_weights(self.weights)


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache in device memory (G1). Sizes in bytes; None is "auto".

    `kv_memory` is the pool itself; `device_memory` is everything on the device (weights, workspace, pool);
    `memory_fraction` is the pool's share of what is free after weights and workspace. `kv_factors` is a file that
    `LLM.calibrate_kv` made.
    """

    kv_format: str = "auto"
    kv_factors: str | None = None
    kv_memory: int | None = None
    device_memory: int | None = None
    memory_fraction: float | None = None
    block_tokens: int = 256
    prefix_cache: bool = True
    tail_every: int = 8192

    def __post_init__(self) -> None:
        _check_whole(self, "block_tokens", "tail_every")
        if self.memory_fraction is not None and not 0.0 < self.memory_fraction <= 1.0:
            raise LongctxError(f"memory_fraction must be above 0 and at most 1, got {self.memory_fraction}")


@dataclass(frozen=True)
class SchedulerConfig:
    """How steps are cut.

    A step's predicted time stays under `step_seconds`, and under `itl_target_s` while another request decodes.
    `chunk_tokens` fixes the chunk instead; `deterministic` also computes decoded tokens with the prefill kernel, so
    that every logit is the same bit for bit whatever was cached, preempted or computed beside it.
    """

    max_running: int = 8
    max_queue: int = 1024
    max_chunk_tokens: int = 2048
    chunk_tokens: int | None = None
    step_seconds: float = 2.0
    itl_target_s: float = 0.5
    deterministic: bool = False

    def __post_init__(self) -> None:
        _check_whole(self, "max_running", "max_queue", "max_chunk_tokens")
        if self.chunk_tokens is not None:
            _check_whole(self, "chunk_tokens")
        for name in ("step_seconds", "itl_target_s"):
            value = getattr(self, name)
            if not (isinstance(value, Real) and float(value) > 0):
                raise LongctxError(f"{name} must be a positive number of seconds, got {value!r}")

    @property
    def largest_chunk(self) -> int:
        """The most prompt tokens one step can hold; window pools are sized for it."""
        return self.chunk_tokens if self.chunk_tokens is not None else self.max_chunk_tokens


@dataclass(frozen=True)
class ComputeConfig:
    """What computes a step. `attention`: the backend, "auto" for the fastest that the model's device has."""

    attention: str = "auto"


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from."""

    load: LoadConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    variant: VariantConfig = field(default_factory=VariantConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)

    @classmethod
    def from_options(cls, model: str, **options: Any) -> EngineConfig:
        """Build a config from flat option names, as Python callers and the command line use them.

        Sizes may be text such as "8GiB", lengths text such as "128K".

        Raises `LongctxError` for a name that no part knows, naming those that exist.
        """
        return cls(LoadConfig(model)).changed(**options)

    def changed(self, **options: Any) -> EngineConfig:
        """This config with some options set, by the names and with the errors of `from_options`."""
        for name, parse in (
            ("kv_memory", parse_bytes),
            ("device_memory", parse_bytes),
            ("max_model_len", parse_tokens),
            ("chunk_tokens", parse_tokens),
            ("max_chunk_tokens", parse_tokens),
            ("window", parse_tokens),
            ("local_chunk", parse_tokens),
        ):
            if isinstance(options.get(name), str):
                options[name] = parse(options[name], name)
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        changes: dict[str, dict[str, Any]] = {part_name: {} for part_name in parts}
        for name, value in options.items():
            for part_name, part in parts.items():
                if name != "model" and name in {f.name for f in fields(part)}:
                    changes[part_name][name] = value
                    break
            else:
                known = sorted(f.name for part in parts.values() for f in fields(part) if f.name != "model")
                raise LongctxError(f"unknown option {name!r}; known options: {', '.join(known)}")
        # Each part at once: its settings are checked together.
        return EngineConfig(**{name: replace(part, **changes[name]) for name, part in parts.items()})
