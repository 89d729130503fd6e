"""How much memory this process holds and has held, as the system says, and giving some back; imports nothing heavy."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

if sys.platform != "win32":
    import resource

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int | None:
    """Resident bytes now, or None where the system does not say."""
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int | None:
    """The most resident bytes ever, or since `reset_peak`; None where the system does not say.

    Linux's `ru_maxrss` is not used: it is inherited through exec, so a large parent's size would be reported as ours.
    """
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status_bytes("VmHWM")


def reset_peak() -> bool:
    """Forget the peak so far; False where the system cannot."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def trim_heap() -> None:
    """Give freed pages inside the C library's heap back to the system, where the library knows how.

    Blocks of up to 32 MiB come from glibc's heap; a small one that lives on beside them can keep each from being used
    again, so that a loop over large tensors grows by one of them every time.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(field: str) -> int | None:
    if not _STATUS.exists():
        return None
    line = next((line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:")), None)
    return None if line is None else int(line.split()[1]) * 1024
