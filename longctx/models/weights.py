"""Weights from safetensors files: memory-mapped, strict about names and shapes, and digested."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from longctx.errors import ModelError
from longctx.models.cache import cache_root
from longctx.models.empty import embedding_and_head, empty_model

# Their checkpoints store experts one by one or packed in four bits; transformers' own loader puts them together.
_BY_TRANSFORMERS = {"mixtral", "qwen3_moe", "gpt_oss"}
# Old checkpoints hold rotary frequencies, which are computed.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")
# Picture-and-text checkpoints hold the language model under a prefix: Gemma 3's in two historical spellings, Llama 4's.
_PICTURE_PARTS = re.compile(r"^(model\.)?(vision_tower|vision_model|multi_modal_projector)\.")
_TEXT_PREFIX = re.compile(r"^(?:model\.language_model\.|language_model\.model\.)")
# Fixed scales for a quantized cache, as several tools name them.
_KV_SCALES = re.compile(r"self_attn\.(?:\w+\.)*(?:k|v|kv)_(?:scale|zero_point)$|self_attn\.[kv]_proj\.output_scale$")
_SHOWN_NAMES = 6

log = logging.getLogger(__name__)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, all present and whole in their headers. Raises ModelError."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is corrupt ({error}); download it again") from error
        files = [folder / name for name in names]
    else:
        single = folder / "model.safetensors"
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no .safetensors weights; convert the model to safetensors")
    for file in files:
        if not file.exists():
            raise ModelError(f"{folder} lacks the weight file {file.name}; download it again")
        _check_whole(file)
    return files


def _check_whole(file: Path) -> None:
    """Opening compares the header with the file's size; without it a file cut short would fault when it is read."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{file} is corrupt or cut short ({reason}); download it again") from error


def load_weights(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, linears_as_stored: bool = False
) -> PreTrainedModel:
    """Hugging Face's model with the folder's weights; those stored in `dtype` stay memory-mapped.

    With `linears_as_stored` the weights of linears stay so in whatever type, for one who converts them by pieces.
    A mapped tensor occupies memory only where it is read: of a tied embedding the rows in use. Missing, unexpected and
    wrongly shaped tensors are a ModelError that lists them.
    """
    files = weight_files(folder)
    if config.model_type in _BY_TRANSFORMERS or getattr(config, "quantization_config", None) is not None:
        return _load_by_transformers(folder, config, dtype)
    model = empty_model(config, dtype)
    state = _map_tensors(files, dtype, _linear_weights(model) if linears_as_stored else frozenset())
    tied = _settle_tied_head(model, state, folder)
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unexpected = [n for n in state if n not in wanted and not any(p.search(n) for p in (_IGNORED, *ignored))]
    wrong = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in state and state[name].shape != tensor.shape
    ]
    _refuse(folder, config, wanted.keys() - state.keys(), unexpected, wrong)
    model.load_state_dict({name: state[name] for name in wanted}, assign=True, strict=False)
    model.tie_weights()
    return model.requires_grad_(False)


def _linear_weights(model: PreTrainedModel) -> frozenset[str]:
    """The names of linears' weights that are nothing else besides: no look-up reads them."""
    embedding, _ = embedding_and_head(model)
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    return frozenset(f"{name}.weight" for name, linear in linears.items() if linear.weight is not embedding)


def _map_tensors(files: list[Path], dtype: torch.dtype, as_stored: frozenset[str]) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for stored in tensors.keys():  # noqa: SIM118 - not a mapping
                if _PICTURE_PARTS.match(stored):
                    continue
                tensor = tensors.get_tensor(stored)
                name = _TEXT_PREFIX.sub("model.", stored).removeprefix("language_model.")
                state[name] = tensor.to(dtype) if tensor.is_floating_point() and name not in as_stored else tensor
    return state


def _settle_tied_head(model: PreTrainedModel, state: dict[str, torch.Tensor], folder: Path) -> set[str]:
    """The names that the embedding serves as well. A tied model's file may hold the head too, if it is the same."""
    embedding, head = embedding_and_head(model)
    if head is not embedding:
        return set()
    first, *others = (name for name, p in model.named_parameters(remove_duplicate=False) if p is embedding)
    for other in others:
        if other in state and first in state and not torch.equal(state.pop(other), state[first]):
            raise ModelError(
                f"{folder} says that {other} is tied to {first}, but holds a different one; "
                "set tie_word_embeddings to false in its config.json if the weights are right"
            )
    return set(others)


def _load_by_transformers(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, output_loading_info=True, local_files_only=True
        )
    except (ValueError, RuntimeError, OSError, ImportError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{folder} cannot be loaded: {reason}") from error
    model, info = loaded
    wrong = [str(item) for item in info["mismatched_keys"]]
    _refuse(folder, config, info["missing_keys"], info["unexpected_keys"], wrong)
    return model.eval().requires_grad_(False)


def _refuse(
    folder: Path, config: PreTrainedConfig, missing: Iterable[str], unexpected: Iterable[str], wrong: Iterable[str]
) -> None:
    names = list(unexpected)
    scales = [name for name in names if _KV_SCALES.search(name)]
    quantization = getattr(config, "quantization_config", None)
    if scales or (isinstance(quantization, dict) and quantization.get("kv_cache_scheme")):
        # Whatever their values are: none of them reaches a key or a value.
        log.warning(
            "%s brings scales for a quantized cache (%s): not used, a lossy format computes its own for every token",
            folder,
            sorted(scales)[0] if scales else "kv_cache_scheme",
        )
    problems = describe_mismatch(missing, set(names).difference(scales), wrong)
    if problems:
        raise ModelError(f"the weights in {folder} do not fit a {config.model_type} model; {problems}")


def describe_mismatch(missing: Iterable[str], unexpected: Iterable[str], wrong: Iterable[str]) -> str:
    """The names of tensors that do not fit, a few of each sort; empty when all do."""
    problems = []
    for what, names in (
        ("missing", sorted(missing)),
        ("unexpected", sorted(unexpected)),
        ("wrong shape", sorted(wrong)),
    ):
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        if names:
            problems.append(f"{what}: {', '.join(names[:_SHOWN_NAMES])}{more}")
    return "; ".join(problems)


def dummy_weights(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with small random weights, the same ones every time, for measuring and testing without files."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def weights_digest(files: list[Path] | None, config: PreTrainedConfig) -> str:
    """A hex digest of the weight files' content and the config; None stands for the dummy weights.

    The files are read once; their digests are kept by path, size and time.
    """
    digest = hashlib.blake2b(digest_size=32)
    digest.update(_config_bytes(config))
    if files is None:
        digest.update(b"dummy weights 1")
    for file in files or ():
        digest.update(file.name.encode() + b"\0" + _file_digest(file).encode())
    return digest.hexdigest()


def kept_digest(files: list[Path], config: PreTrainedConfig) -> str | None:
    """The digest of files that were read before; None where one was not, rather than reading it."""
    if all(_kept_path(file).exists() for file in files):
        return weights_digest(files, config)
    return None


def _config_bytes(config: PreTrainedConfig) -> bytes:
    values: dict[str, Any] = config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"):
        values.pop(name, None)
    return json.dumps(values, sort_keys=True, default=str).encode()


def _file_digest(file: Path) -> str:
    kept = _kept_path(file)
    with suppress(OSError):
        known = kept.read_text()
        if len(known) == 64:
            return known
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
    with suppress(OSError):  # without the note the next start reads the file again
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_name(f"{kept.name}.tmp-{os.getpid()}")
        temporary.write_text(digest)
        temporary.replace(kept)
    return digest


def _kept_path(file: Path) -> Path:
    """Where a file's digest is kept: it is another one for another path, size or time."""
    path, stat = file.resolve(), file.stat()
    identity = f"{path}|{stat.st_size}|{stat.st_mtime_ns}"
    return cache_root() / "digests" / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
