"""Attention variants on the command line: what a plan counts and says, and nonsense in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longctx.cli.app import main
from tests.helpers.tiny import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_tiny("llama", max_position_embeddings=65536).config.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path))


def test_a_plan_counts_what_is_held_and_says_that_it_is_lossy(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    arguments = ["plan", str(folder), "--tokens", "16K,64K", "--kv-memory", "1GB"]
    plans = {}
    for variant in ([], ["--variant", "streaming", "--window", "1K", "--sinks", "8"], ["--variant", "local-chunk"]):
        assert main([*arguments, *variant, "--json"]) == 0
        plans[len(plans)] = json.loads(capsys.readouterr().out)["plans"]
    token = 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, dims, bytes
    assert [[p["kv_bytes"] // token for p in each] for each in plans.values()] == [
        [16384, 65536],
        [1032, 1032],
        [8192, 8192],
    ]
    names = [each[0]["attention_variant"] for each in plans.values()]
    assert names == ["exact", "streaming-w1024-s8", "local-chunk-c8192"]
    short, long = plans[1]
    assert short["needed_bytes"] == long["needed_bytes"] < plans[0][1]["needed_bytes"]
    assert main([*arguments, "--variant", "streaming"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "lossy: full-attention layers see the last 4,096 tokens and the first 4 only" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "sparse"], "'sparse' is unknown"),
        (["--variant", "streaming", "--window", "4"], "sinks 4 must be fewer than the window's 4"),
        (["--window", "512"], "window 512 goes with the attention variant streaming"),
        (["--variant", "streaming", "--window", "64K"], "so it changes nothing"),
        (["--variant", "local-chunk", "--sinks", "2"], "sinks 2 goes with the attention variant streaming"),
    ],
)
def test_nonsense_is_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: list[str], message: str
) -> None:
    assert main(["plan", str(folder), "--tokens", "1K", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


def test_a_geometry_has_no_variant(capsys: pytest.CaptureFixture[str]) -> None:
    geometry = ["--geometry", "layers=2,kv_heads=1,head_dim=16", "--tokens", "1K"]
    assert main(["plan", *geometry, "--variant", "streaming"]) == 2
    assert "--variant streaming goes with a MODEL" in capsys.readouterr().err
