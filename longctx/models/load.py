"""Loads a model: its source, config, weights and tokenizer, checked before anything is allocated."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from longctx.errors import ModelError
from longctx.models.allow import check, text_config
from longctx.models.cache import Progress
from longctx.models.gguf import convert, converted_folder
from longctx.models.gguf_config import config_from_gguf
from longctx.models.gguf_reader import read_gguf
from longctx.models.inspect import spec_from_config
from longctx.models.limits import apply_limits
from longctx.models.sources import fetch, resolve
from longctx.models.spec import INT8_WEIGHTS, ModelSpec
from longctx.models.tokenizer import load_tokenizer
from longctx.models.weights import dummy_weights, kept_digest, load_weights, weight_files, weights_digest


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be hooked: Hugging Face's own classes, in eval mode, without gradients.

    `digest` identifies weights and config (not dtype); ids from `vocab_limit` on are rows of the head that the
    tokenizer does not know and that must never be sampled; `eos_token_ids` end a generation. `folder` is where its
    files lie, the tokenizer's among them. Engines over the same model hold `turn` while they compute.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    spec: ModelSpec
    digest: str
    eos_token_ids: frozenset[int]
    vocab_limit: int
    chat_template: str | None
    folder: Path | None = None
    turn: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)


def load_config_only(
    name: str,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    rope_scaling: str | None = None,
    unverified: bool = False,
    device: str = "cpu",
    weights: str = "auto",
    progress: Progress | None = None,
) -> tuple[PreTrainedConfig, ModelSpec]:
    """The config (any rope scaling applied) and geometry of a model, without its weights. Raises ModelError.

    A built-in model is pulled, not converted; of a hub model only the small files are fetched.
    """
    path = fetch(resolve(name), weights=False, progress=progress)
    config = _read_config(path)
    check(config, unverified)
    spec = spec_from_config(config, name, dtype, max_model_len, rope_scaling, device, weights)
    return apply_limits(config, max_model_len, rope_scaling)[0], spec


def known_digest(name: str, config: PreTrainedConfig) -> str | None:
    """The digest that `load_model` gives a model of `load_config_only`'s config, if its weights were read before.

    None rather than reading them, or converting or fetching anything.
    """
    path = resolve(name).path or Path(str(config.name_or_path))
    folder = converted_folder(path) if path.is_file() else path
    try:
        return kept_digest(weight_files(folder), config)
    except (ModelError, OSError):
        return None


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    max_model_len: int | None = None,
    rope_scaling: str | None = None,
    unverified: bool = False,
    device: str = "cpu",
    weights: str = "auto",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model by built-in name, folder, .gguf file or hub id. Raises ModelError, each in one line.

    dtype "auto" is float32 on a CPU and the config's own elsewhere. `load_format="dummy"` makes small random weights
    from the config alone. `unverified` admits a type outside the allow-list; the engine compares it with Hugging Face.
    `weights` "int8" says so in the spec; the engine's `assemble` makes them.
    """
    if load_format not in ("auto", "dummy"):
        raise ModelError(f"load format {load_format!r} is not known; choose auto or dummy")
    dummy = load_format == "dummy"
    path = fetch(resolve(name), weights=not dummy, progress=progress)
    config = _read_config(path)
    check(config, unverified)
    spec = spec_from_config(config, name, dtype, max_model_len, rope_scaling, device, weights)
    config, _ = apply_limits(config, max_model_len, rope_scaling)
    torch_dtype = getattr(torch, spec.dtype)

    folder = path
    if path.is_file() and not dummy:
        folder = convert(path, progress)
        config.name_or_path = str(folder)
    as_stored = spec.weights == INT8_WEIGHTS
    model = dummy_weights(config, torch_dtype) if dummy else load_weights(folder, config, torch_dtype, as_stored)
    digest = weights_digest(None if dummy else weight_files(folder), config)
    tokenizer = load_tokenizer(folder) if folder.is_dir() else None
    if device != "cpu":
        model.to(torch.device(device))  # type: ignore[arg-type]
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        spec=spec,
        digest=digest,
        eos_token_ids=_eos_ids(folder, config, tokenizer),
        vocab_limit=_vocab_limit(tokenizer, spec.vocab_size),
        chat_template=_template(tokenizer),
        folder=folder,
    )


def _read_config(path: Path) -> PreTrainedConfig:
    """The config of a model folder or .gguf file; of a picture-and-text model the text part."""
    if path.is_file():
        return config_from_gguf(read_gguf(path))
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"the config.json in {path} cannot be read: {reason}") from error
    return text_config(config)


def _eos_ids(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The union of what generation config, config and tokenizer say: a model that never stops costs more than one that
    stops at any of its ends. GGUF's eos, eot and eom keys are in the converted folder's generation config."""
    sources: list[Any] = [config.eos_token_id]
    if (folder / "generation_config.json").exists():
        try:
            sources.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
        except (ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"the generation_config.json in {folder} cannot be read: {reason}") from error
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    ids: set[int] = set()
    for source in sources:
        ids.update(source if isinstance(source, Iterable) else [] if source is None else [source])
    return frozenset(int(i) for i in ids)


def _vocab_limit(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> int:
    if tokenizer is None:
        return vocab_size
    return min(vocab_size, max(tokenizer.get_vocab().values(), default=vocab_size - 1) + 1)


def _template(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    template = tokenizer.chat_template if tokenizer is not None else None
    if isinstance(template, dict):  # several by name; "default" is the one for chatting
        template = template.get("default")
    return template or None
