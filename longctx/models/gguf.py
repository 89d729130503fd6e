"""Converts a GGUF file, once, into a folder of float32 safetensors that any later start maps into memory in seconds.

float32, because bfloat16 would round what the file says: a Q8_0 value alone has an 8-bit integer times an 11-bit scale.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedConfig

from longctx.errors import ModelError
from longctx.models.cache import Progress, cache_root, filling, locked, no_progress
from longctx.models.empty import empty_model
from longctx.models.gguf_config import ROPE_TENSORS, config_from_gguf, stop_ids
from longctx.models.gguf_reader import GGUFFile, read_gguf
from longctx.models.weights import describe_mismatch

with suppress(ImportError):  # `read_gguf`, which is called first, says what to do without it
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

_VERSION = 1  # of what this file writes; a new one makes old folders be converted again
_SHARD_BYTES = 1 << 30

# How each supported byte-level vocabulary splits text, where it is not what Hugging Face's reader sets by itself.
_SPLITS_DIGITS = {"smollm", "starcoder", "refact"}
_KNOWN_SPLITS = {"default", "gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "gpt-4o", "tekken", "dbrx"}


def convert(gguf_path: Path | str, progress: Progress | None = None) -> Path:
    """The safetensors folder of a GGUF file, made on first use and found again by the file's path, size and time.

    The folder appears whole or not at all: after a kill the next call starts over, and two processes do it once.
    Raises ModelError: unreadable or unsupported file, tensors missing or unknown (names listed), disk full.
    """
    path = Path(gguf_path).expanduser().resolve()
    target = converted_folder(path)
    if target.exists():
        return target
    with locked(target):
        if not target.exists():
            file = read_gguf(path)
            config = config_from_gguf(file)
            sources = _match_tensors(file, config)
            need = 4 * sum(int(np.prod(file.tensors[name].shape)) for name in sources.values())
            with filling(target, f"the converted {path.name}", need + (32 << 20)) as folder:
                _write_weights(file, config, sources, folder, progress or no_progress)
                _write_config(file, config, folder)
                _write_tokenizer(file, folder, progress or no_progress)
    return target


def converted_folder(gguf_path: Path) -> Path:
    """Where `convert` puts a file; the folder exists once it has."""
    path = gguf_path.expanduser().resolve()
    return cache_root() / "converted" / f"{path.stem}-{_identity(path)}"


def _identity(path: Path) -> str:
    stat = path.stat()
    text = f"{path}|{stat.st_size}|{stat.st_mtime_ns}|{_VERSION}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _match_tensors(file: GGUFFile, config: PreTrainedConfig) -> dict[str, str]:
    """Model parameter name -> GGUF tensor name, a bijection; anything left over on either side is an error."""
    shapes = {name: tuple(parameter.shape) for name, parameter in empty_model(config).named_parameters()}
    arch = next(key for key, value in MODEL_ARCH_NAMES.items() if value == file.architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    sources = {}
    for parameter in shapes:
        stem, _, suffix = parameter.rpartition(".")
        sources[parameter] = f"{names.get_name(stem)}.{suffix}"
    assert len(set(sources.values())) == len(sources), "two parameters have one GGUF name"

    known = {*sources.values(), *ROPE_TENSORS} | ({"output.weight"} if config.tie_word_embeddings else set())
    wrong = [
        f"{source} {file.tensors[source].shape} instead of {shapes[parameter]}"
        for parameter, source in sources.items()
        if source in file.tensors and file.tensors[source].shape != shapes[parameter]
    ]
    problems = describe_mismatch(set(sources.values()) - set(file.tensors), set(file.tensors) - known, wrong)
    if problems:
        raise ModelError(f"the tensors in {file.path} do not fit a {config.model_type} model; {problems}")
    return sources


def _write_weights(
    file: GGUFFile, config: PreTrainedConfig, sources: dict[str, str], folder: Path, report: Progress
) -> None:
    undo = _undo_for(config)
    sizes = {name: 4 * int(np.prod(file.tensors[source].shape)) for name, source in sources.items()}
    shards = list(_shards(sizes))
    total, done = sum(sizes.values()), 0
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        tensors = {}
        for name in names:
            tensors[name] = torch.from_numpy(undo(name, file.read_tensor(sources[name])))
            done += sizes[name]
            report(f"converting {file.path.name}", done, total)
        shard = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(names, shard)
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (folder / "model.safetensors.index.json").write_text(text)


def _shards(sizes: dict[str, int]) -> Iterator[list[str]]:
    """Tensors in order, cut so that one shard bounds the memory a conversion needs."""
    names: list[str] = []
    held = 0
    for name, size in sizes.items():
        if names and held + size > _SHARD_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    if names:
        yield names


def _undo_for(config: PreTrainedConfig) -> Callable[[str, np.ndarray], np.ndarray]:
    """What llama.cpp's converter did to a tensor, undone: rotary rows permuted, Gemma norms stored as 1 + w."""
    llama = config.model_type in ("llama", "mistral")
    gemma = config.model_type.startswith("gemma")

    def undo(name: str, weight: np.ndarray) -> np.ndarray:
        if llama and (match := re.search(r"\.(q|k)_proj\.(weight|bias)$", name)):
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
            paired = weight.reshape(heads, config.head_dim // 2, 2, *weight.shape[1:])
            return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(weight.shape)
        if gemma and name.endswith("norm.weight"):
            return weight - np.float32(1)
        return weight

    return undo


def _write_config(file: GGUFFile, config: PreTrainedConfig, folder: Path) -> None:
    config.architectures = [type(empty_model(config)).__name__]
    config.save_pretrained(folder)
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": stop_ids(file) or None}
    text = json.dumps({key: value for key, value in ids.items() if value is not None}, indent=1)
    (folder / "generation_config.json").write_text(text)


def _write_tokenizer(file: GGUFFile, folder: Path, report: Progress) -> None:
    if "tokenizer.ggml.tokens" not in file.metadata:
        return
    report(f"reading the vocabulary of {file.path.name}", 0.0, 1.0)
    kind, split = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and split not in _KNOWN_SPLITS | _SPLITS_DIGITS:
        raise ModelError(f"{file.path} splits text by rule {split!r}, which is not known; use its safetensors folder")
    tokenizer = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name, local_files_only=True)
    if kind == "gpt2" and split in _SPLITS_DIGITS:
        digits, byte_level = (
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        )
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    template = file.metadata.get("tokenizer.chat_template")
    if template and not tokenizer.chat_template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    report(f"reading the vocabulary of {file.path.name}", 1.0, 1.0)
