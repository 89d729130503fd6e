"""Files that a command writes: new ones only, for a result is never overwritten."""

from __future__ import annotations

from pathlib import Path

from longctx.errors import LongctxError


def new_file(name: str) -> Path:
    """A file that can be written and is not there yet."""
    path = Path(name).expanduser()
    if path.exists():
        raise LongctxError(f"--out {name} exists, and results are not overwritten: give another name")
    if not path.parent.is_dir():
        raise LongctxError(f"--out {name}: there is no folder {path.parent}; make it first")
    return path
