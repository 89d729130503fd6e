"""How many positions a model has, and how rope scaling takes it beyond them."""

from __future__ import annotations

import copy
import logging
from typing import Any

from transformers import PreTrainedConfig

from longctx.errors import ModelError
from longctx.models.spec import RopeSpec

log = logging.getLogger(__name__)

SCALINGS = ("yarn", "linear")
_REGIMES = ("longrope", "dynamic")


def rope_parts(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rope parameters of a model, one dict, or one per layer type where they differ (Gemma 3)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in parameters.values() if isinstance(part, dict)]
    return nested or ([parameters] if parameters else [])


def rope_spec(config: PreTrainedConfig) -> RopeSpec:
    """Which regimes a config's rope has, with the length at which they change."""
    for part in rope_parts(config):
        kind = part.get("rope_type", "default")
        if kind == "longrope":
            original = part.get("original_max_position_embeddings") or config.original_max_position_embeddings
            return RopeSpec(kind, int(original))
        if kind == "dynamic":
            return RopeSpec(kind, int(config.max_position_embeddings))
    return RopeSpec()


def model_positions(config: PreTrainedConfig) -> int:
    """The positions a model was made for.

    Configs disagree about whether max_position_embeddings counts the scaling: for YaRN the larger reading is taken, for
    dynamic NTK Hugging Face itself defines it as the length before scaling.
    """
    positions = int(config.max_position_embeddings)
    for part in rope_parts(config):
        factor = part.get("factor") or 1.0
        if part.get("rope_type") == "dynamic":
            return int(positions * factor)
        if part.get("rope_type") == "yarn":
            return max(positions, int((part.get("original_max_position_embeddings") or 0) * factor))
    return positions


def apply_limits(
    config: PreTrainedConfig, max_model_len: int | None, rope_scaling: str | None
) -> tuple[PreTrainedConfig, int]:
    """The config with the rope scaling a user asked for (a copy, or the same when none), and the position limit.

    The factor is `max_model_len` over the model's own positions. Models with one rope per layer type are scaled in
    their global layers only: a sliding layer never sees a distance beyond its window. Raises ModelError.
    """
    own = model_positions(config)
    if rope_scaling is not None and rope_scaling not in SCALINGS:
        raise ModelError(f"rope scaling {rope_scaling!r} is not known; choose one of {', '.join(SCALINGS)}")
    if max_model_len is None:
        if rope_scaling is not None:
            raise ModelError(f"rope scaling {rope_scaling!r} needs --max-model-len: how far beyond {own} positions?")
        return config, own
    if max_model_len < 1:
        raise ModelError(f"a maximum length of {max_model_len} tokens is not possible; give at least 1")
    if max_model_len <= own:
        if rope_scaling is not None:
            raise ModelError(f"the model has {own} positions, {max_model_len} need no rope scaling; leave it out")
        return config, max_model_len
    if rope_scaling is None:
        raise ModelError(
            f"the model has {own} positions, not {max_model_len}; add --rope-scaling yarn (or linear), at some cost in "
            f"quality, or lower --max-model-len to {own}"
        )
    return _scaled(config, own, max_model_len, rope_scaling), max_model_len


def _scaled(config: PreTrainedConfig, own: int, wanted: int, kind: str) -> PreTrainedConfig:
    scaled = copy.deepcopy(config)
    parameters = scaled.rope_parameters
    part = parameters["full_attention"] if isinstance(parameters.get("full_attention"), dict) else parameters
    if part.get("rope_type", "default") != "default":
        raise ModelError(
            f"the model's rope is already scaled ({part['rope_type']}), a second scaling is not possible; "
            f"its limit is {own} positions"
        )
    part |= {"rope_type": kind, "factor": wanted / own}
    if kind == "yarn":
        part["original_max_position_embeddings"] = own
    scaled.max_position_embeddings = wanted
    log.warning(
        "rope scaling %s takes the model from %d to %d positions; expect some loss of quality", kind, own, wanted
    )
    return scaled
