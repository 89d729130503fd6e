"""What a MODEL argument means, and one line for each way in which it can mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from longctx.errors import ModelError
from longctx.models.sources import fetch, resolve


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_kinds(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    (tmp_path / "smollm2-135m").mkdir()
    assert resolve("smollm2-135m").kind == "builtin"  # a folder of that name needs ./
    assert resolve("folder").kind == "folder" and fetch(resolve("folder")) == Path("folder")
    assert resolve(tmp_path / "some.gguf").kind == "gguf"
    source = resolve("owner/some-model")
    assert (source.kind, source.path) == ("hub", None)


def test_folder_with_one_gguf(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.gguf").write_bytes(b"GGUF")
    assert resolve("one").path == Path("one/a.gguf")
    (tmp_path / "one" / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 \.gguf files"):
        resolve("one")


@pytest.mark.parametrize("name", ["nothing-here", "./owner/model", "/no/such/folder", "missing.gguf", "a/b/c", ""])
def test_missing_names_say_what_could_be_given(name: str) -> None:
    with pytest.raises(ModelError, match=r"no model .*smollm2-135m") as caught:
        resolve(name)
    assert "\n" not in str(caught.value)


def test_empty_folder_and_other_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"holds no config\.json and no \.gguf"):
        resolve("empty")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"a file but not a \.gguf"):
        resolve("weights.bin")


def test_hub_id_offline_is_one_line() -> None:
    with pytest.raises(ModelError, match="owner/some-model is not on this machine") as caught:
        fetch(resolve("owner/some-model"))
    assert "\n" not in str(caught.value)
