"""What a MODEL argument means: a built-in name, a local folder, a GGUF file, or a hub id."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from longctx.errors import ModelError
from longctx.models.builtin import BUILTIN, builtin_path, pull
from longctx.models.cache import Progress

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CONFIG_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "tokenizer*"]


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. `path` is a folder or a .gguf file; None for a hub id, which `fetch` brings here."""

    kind: Literal["builtin", "folder", "gguf", "hub"]
    path: Path | None
    name: str


def resolve(name_or_path: str | Path) -> ModelSource:
    """Tell what `name_or_path` is without any network. Raises ModelError in one line when it is nothing."""
    name = str(name_or_path)
    if name in BUILTIN:
        return ModelSource("builtin", builtin_path(name), name)
    path = Path(name).expanduser()
    if name and path.is_dir():
        if (path / "config.json").exists():
            return ModelSource("folder", path, name)
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return ModelSource("gguf", ggufs[0], name)
        what = f"{len(ggufs)} .gguf files, give one of them" if ggufs else "no config.json and no .gguf file"
        raise ModelError(f"the folder {name} is not a model: it holds {what}")
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return ModelSource("gguf", path, name)
        raise ModelError(f"{name} is a file but not a .gguf; give a model's folder, a .gguf file, or a hub id")
    looks_local = name.startswith((".", "/", "~")) or name.lower().endswith(".gguf") or name.count("/") > 1
    if not looks_local and _HUB_ID.fullmatch(name):
        return ModelSource("hub", None, name)
    raise ModelError(
        f"there is no model {name!r}: no such folder or .gguf file, no hub id (owner/name), and the built-in names are "
        f"{', '.join(sorted(BUILTIN))}"
    )


def fetch(source: ModelSource, *, weights: bool = True, progress: Progress | None = None) -> Path:
    """The source's folder or .gguf file on this machine, downloaded if need be; without `weights` the rest only."""
    if source.kind == "builtin":
        return pull(source.name, progress)
    if source.path is not None:
        return source.path
    patterns = _CONFIG_FILES + (["*.safetensors"] if weights else [])
    try:
        return Path(snapshot_download(source.name, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ModelError(f"{source.name} is gated on the hub; accept its terms there and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no model {source.name!r} (or it needs a token); check the name") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            f"{source.name} is not on this machine and the hub cannot be reached ({type(error).__name__}); "
            f"give a local folder or .gguf file, or one of the built-in {', '.join(sorted(BUILTIN))}"
        ) from error
