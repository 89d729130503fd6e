"""How much of a mapped file is in memory."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(path: Path) -> int:
    """Bytes of this process's memory that are resident pages of the file `path`."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
