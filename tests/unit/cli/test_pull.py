"""`longctx pull`: what it says, what it refuses, and that it can be repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from longctx.cli.pull import pull
from longctx.errors import ModelError
from longctx.models import builtin, gguf


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Fetching and converting replaced by notes of what was asked, each writing its file."""
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path))
    made: list[str] = []

    def fetch(name: str, progress: Any = None) -> Path:
        made.append(f"pull {name}")
        path = builtin.builtin_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        progress(f"downloading {name}", 50, 100)
        return path

    def convert(path: Path, progress: Any = None) -> Path:
        made.append(f"convert {path.name}")
        progress("converting", 100, 100)
        return tmp_path / "folder"

    monkeypatch.setattr(builtin, "pull", fetch)
    monkeypatch.setattr(gguf, "convert", convert)
    return made


def invoke(*args: str) -> Any:
    app = typer.Typer()
    app.command()(pull)
    return CliRunner().invoke(app, list(args))


def test_pull_fetches_converts_and_says_where(calls: list[str], tmp_path: Path) -> None:
    result = invoke("smollm2-135m", "gemma3-270m")
    assert result.exit_code == 0
    assert [call.split()[0] for call in calls] == ["pull", "convert"] * 2
    first, second = result.stdout.splitlines()
    assert first == f"smollm2-135m: ready in {tmp_path / 'folder'}, Apache-2.0"
    assert "Gemma Terms of Use" in second and "ai.google.dev/gemma/terms" in second
    for part in ("pulling smollm2-135m", "downloading smollm2-135m: 50 %", "50 B of 100 B", "converting: 100 %"):
        assert part in result.stderr


def test_pulling_again_gives_the_same_answer(calls: list[str]) -> None:
    assert invoke("smollm2-135m").stdout == invoke("smollm2-135m").stdout


def test_list_says_what_is_here(calls: list[str]) -> None:
    assert invoke("--list").stdout.count("not pulled yet") == 2
    invoke("smollm2-135m")
    calls.clear()
    lines = invoke("--list").stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["gemma3-270m", "smollm2-135m"]
    assert "not pulled yet" in lines[0] and "here already" in lines[1] and "98.4 MB" in lines[1]
    assert calls == []


def test_json_is_pure(calls: list[str], tmp_path: Path) -> None:
    (row,) = json.loads(invoke("smollm2-135m", "--json").stdout)["models"]
    assert row["folder"] == str(tmp_path / "folder") and row["license"] == "Apache-2.0"
    rows = json.loads(invoke("--list", "--json").stdout)["models"]
    assert [bool(r["path"]) for r in rows] == [False, True]


def test_an_unknown_name_is_refused_before_anything_is_fetched(calls: list[str]) -> None:
    result = invoke("smollm2-135m", "gpt-9")
    assert isinstance(result.exception, ModelError)
    assert str(result.exception) == "'gpt-9' is not a built-in model; there are gemma3-270m, smollm2-135m"
    assert calls == []


@pytest.mark.parametrize("args", [[], ["--list", "smollm2-135m"]])
def test_it_takes_names_or_list(calls: list[str], args: list[str]) -> None:
    assert isinstance(invoke(*args).exception, ModelError)
