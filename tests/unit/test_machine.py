"""Memory, cores and speed of this machine, containers included."""

import mmap
from pathlib import Path

import psutil
import pytest

from longctx import machine


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_container_limit_is_the_physical_memory(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert machine.physical_bytes(tmp_path) == total
    assert machine.physical_bytes(write(tmp_path, memory__max="max\n")) == total
    assert machine.physical_bytes(write(tmp_path, memory__max="1000000\n")) == 1_000_000
    assert machine.physical_bytes(write(tmp_path, memory__max=str(2**62))) == total


def test_a_container_has_what_its_limit_leaves_and_its_page_cache(tmp_path: Path) -> None:
    files = {"memory__max": "5000000", "memory__current": "3000000", "memory__stat": "anon 1\ninactive_file 600000\n"}
    assert machine._free_bytes(write(tmp_path, **files)) == 2_600_000
    write(tmp_path, memory__current="9000000")
    assert machine._free_bytes(tmp_path) == 0
    write(tmp_path, memory__max="max")
    assert machine._free_bytes(tmp_path) > 10**8


def test_what_the_process_holds_already_counts_as_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights takes them from the free memory and must not take them from the plan a second time."""
    monkeypatch.setattr(machine, "_free_bytes", lambda _cgroup: 10**9)
    before = machine.available_bytes()
    # A mapping of its own: a tensor may take pages that this process has held all along.
    with mmap.mmap(-1, 100_003_840, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held[:: mmap.PAGESIZE] = bytes([1]) * (len(held) // mmap.PAGESIZE)
        assert abs(machine.available_bytes() - before - len(held)) < 5_000_000


def test_cores_and_name_are_stable() -> None:
    assert machine.core_count() >= 1
    assert machine.fingerprint() == machine.fingerprint() and len(machine.fingerprint()) == 16


def test_the_name_changes_with_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine.fingerprint()
    monkeypatch.setattr(machine, "core_count", lambda: 4096)
    assert machine.fingerprint() != before


def test_measured_speeds_are_those_of_a_computer() -> None:
    speed = machine.measure_speed(0.02)
    assert 1e8 < speed.flops < 1e15
    assert 1e8 < speed.read_bytes_per_s < 1e14
