"""The folder for downloaded and converted models: where it is, and how it is filled by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from longctx.errors import ModelError

# progress(stage, done, total): `stage` is a few words for a person, `done` and `total` are bytes.
Progress = Callable[[str, float, float], None]


def no_progress(stage: str, done: float, total: float) -> None:
    """The callback of a caller who does not want to know."""


def cache_root() -> Path:
    """`LONGCTX_CACHE`, or ~/.cache/longctx; created when missing."""
    root = Path(os.environ.get("LONGCTX_CACHE") or "~/.cache/longctx").expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"the cache folder {root} cannot be made ({error.strerror}); set LONGCTX_CACHE") from error
    return root


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold `target`'s lock file: a second process waits here, and the kernel releases the lock of a killed one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{target}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def filling(target: Path, what: str, need_bytes: int) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends well, and vanishes when it does not.

    The caller holds `target`'s lock, so every other temporary folder of it was left by a killed process and is removed.
    A full disk is one ModelError, before the first byte where it can be known.
    """
    for stale in target.parent.glob(f"{target.name}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    free = shutil.disk_usage(target.parent).free
    if free < need_bytes:
        raise _disk_full(target, what, need_bytes, free)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if target.is_dir():
            shutil.rmtree(target)
        temporary.replace(target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if is_disk_full(error):
            raise _disk_full(target, what, need_bytes, shutil.disk_usage(target.parent).free) from error
        raise


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed for lack of space; safetensors wraps the system's error in text."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left" in str(error) or "os error 28" in str(error)


def _disk_full(target: Path, what: str, need: int, free: int) -> ModelError:
    return ModelError(
        f"no space for {what}: it needs {need / 2**20:.0f} MiB and {target.parent} has {free / 2**20:.0f} MiB free; "
        "free some or set LONGCTX_CACHE to another disk"
    )
