"""`eval drift` on tiny models: exact against exact is zero, a fault is large and grows, and the result is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longctx import LLM, forward
from longctx.cli.app import main
from longctx.drift_note import Measured, NoteKey, drift_line, load_notes, save_note
from longctx.errors import LongctxError
from longctx.evals import drift_suite
from longctx.evals.drift_html import drift_page
from longctx.evals.drift_report import suggest, table_text
from longctx.evals.registry import find_suite
from longctx.evals.suite import EvalJob
from longctx.evals.target import LLMTarget
from longctx.quant.layout import LayerKV
from tests.helpers.fake_target import Fake
from tests.helpers.server import save_tiny

OPTIONS: dict[str, Any] = {"kv_memory": "32MiB", "block_tokens": 16, "max_running": 1}
LENGTH = 192


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "llama", "llama", template=None, peaky=True)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))


@contextmanager
def exact(folder: Path) -> Iterator[LLMTarget]:
    with LLM(str(folder), kv_format="fp32", **OPTIONS) as llm:
        yield LLMTarget(llm, str(folder), options=OPTIONS)


def drift(folder: Path, *formats: str, **job: Any) -> dict[str, Any]:
    with exact(folder) as target:
        report = find_suite("drift").run(
            EvalJob(**{"lengths": (LENGTH,), "kv_formats": formats, "haystack": "filler", "max_tokens": 12, **job}),
            target,
        )
    json.dumps(report, allow_nan=False)
    assert set(report) >= {"score", "cells", "config", "failure"}
    assert "<script" not in drift_page(report) and table_text(report)
    return report


def test_exact_against_exact_is_zero_and_a_format_is_not(llama: Path) -> None:
    report = drift(llama, "fp32", "int8", "int4", control="all", lengths=(640,))
    cells = {cell["format"]: cell for cell in report["cells"]}
    same = cells["fp32"]
    assert same["kl"] == {"mean": 0.0, "p99": 0.0, "max": 0.0} and same["windows"] == [0.0] * 4
    assert same["top1"] == 1.0 and same["growth"] is None and not same["compounds"] and not any(same["layer_errors"])
    assert same["perplexity"] == same["exact_perplexity"]
    assert 0 < cells["int8"]["kl"]["mean"] < 1e-3 < cells["int4"]["kl"]["mean"]
    assert len(cells["int8"]["layer_errors"]) == 2 and 0 < max(cells["int8"]["layer_errors"]) < 0.3
    assert cells["int8"]["bytes_per_token"] < cells["fp32"]["bytes_per_token"] / 2.5
    assert cells["int8"]["perplexity"] == pytest.approx(cells["int8"]["exact_perplexity"], rel=0.05)
    assert same["needles"] == {"score": 0.0, "exact_score": 0.0, "same_answers": 3, "answers": 3}
    assert cells["int4"]["needles"]["same_answers"] < 3
    assert [text["first_difference"] for text in report["greedy"] if text["format"] == "fp32"] == [None] * 3
    assert any(t["first_difference"] is not None for t in report["greedy"] if t["format"] == "int4")
    [control] = report["control"]
    assert control["verdict"] == "ok" and control["kl"] < 1e-6 and report["failure"] is None


def test_a_wrong_scale_is_a_large_drift_that_grows(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded tokens are stored with a scale that is wrong by more and more."""
    store, num_stored = forward.store_tokens, 0

    def wrong(kv: LayerKV, slots: Any, rows: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        nonlocal num_stored
        decoded = len(slots) == 1 and kv.v_format.name == "int8"
        num_stored += decoded
        store(kv, slots, rows, k, v * (1 + 1e-2 * num_stored * decoded))

    [right] = drift(llama, "int8", control="none")["cells"]
    monkeypatch.setattr(forward, "store_tokens", wrong)
    report = drift(llama, "int8", control="none")
    [cell] = report["cells"]
    assert cell["kl_read"] == right["kl_read"], "what was read is stored as before"
    assert cell["kl_decoded"]["mean"] > 30 * right["kl_decoded"]["mean"]
    assert cell["compounds"] and not right["compounds"] and cell["growth"] > 2
    assert report["suggested"]["kv_format"] is None and "compounds" in table_text(report)


def test_weights_are_compared_by_themselves_and_with_a_format(llama: Path) -> None:
    """Another load of the model, over which each format has an engine; exact is whole weights and fp32 KV."""
    report = drift(llama, "fp32", "int8", weights="int8", control="none", lengths=(128,))
    alone, both = report["cells"]
    assert (alone["note"]["stored"], alone["note"]["weights"]) == ("fp32", "int8")
    assert report["config"]["weight_mode"] == "plain"
    assert 1e-6 < alone["kl"]["mean"] < 1e-2 and both["kl"]["mean"] != alone["kl"]["mean"]
    measured = load_notes(NoteKey(report["config"]["weights"], "", "int8", "int8"))
    assert [m.tokens for m in measured] == [128] and measured[0].kl == both["kl"]["mean"]


def test_a_format_without_numbers_is_reported_and_asked_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = forward.store_tokens

    def wrong(kv: LayerKV, slots: Any, rows: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        store(kv, slots, rows, k * (float("nan") if kv.k_format.name == "int8" else 1.0), v)

    with exact(llama) as target:
        monkeypatch.setattr(forward, "store_tokens", wrong)
        report = find_suite("drift").run(
            EvalJob((LENGTH,), kv_formats=("int8",), haystack="filler", control="none"), target
        )
    assert "int8 at 192 tokens" in report["failure"] and report["score"] == 0.0 and not report["greedy"]
    assert "no numbers" in table_text(report) and "int8" in drift_page(report)
    assert report["suggested"]["kv_format"] is None


def test_a_run_goes_on_where_it_stopped_and_overwrites_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    job: dict[str, Any] = {"out": out, "control": "none", "lengths": (128, LENGTH)}
    write = drift_suite.write_greedy
    monkeypatch.setattr(drift_suite, "write_greedy", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drift(llama, "int8", **job)
    assert not (out / "report.json").exists()
    before = (out / "records.jsonl").read_text()
    monkeypatch.setattr(drift_suite, "write_greedy", write)
    monkeypatch.setattr(drift_suite, "Baseline", lambda *args: 1 / 0)
    report = drift(llama, "int8", **job)
    assert (out / "records.jsonl").read_text().startswith(before), "no text was read twice"
    assert [cell["length"] for cell in report["cells"]] == [128, LENGTH]
    assert json.loads((out / "report.json").read_text())["cells"] == report["cells"]
    assert (out / "report.html").exists()
    with pytest.raises(LongctxError, match="another configuration"):
        drift(llama, "int4", **job)


def test_what_cannot_be_compared_is_refused(llama: Path) -> None:
    with pytest.raises(LongctxError, match="MODEL instead of --url"):
        find_suite("drift").run(EvalJob(lengths=(128,)), Fake())
    with pytest.raises(LongctxError, match="--lengths 32 is too short"):
        drift(llama, lengths=(32,))


def test_the_suggestion_is_the_smallest_within_the_limits() -> None:
    def cell(name: str, size: int, kl: float, **more: Any) -> dict[str, Any]:
        fields = {"format": name, "bytes_per_token": size, "kl": {"mean": kl}, "top1": 0.99, "compounds": False}
        return {**fields, "error": None, **more}

    cells = [cell("int8", 50, 0.001), cell("int4", 30, 0.02), cell("fp8", 40, 0.001, compounds=True)]
    assert suggest(cells)["kv_format"] == "int8"
    assert suggest([*cells, cell("k:int8,v:int4", 35, 0.004)])["kv_format"] == "k:int8,v:int4"
    assert suggest([*cells, cell("int8", 50, 0.5)])["kv_format"] is None, "at every length"
    assert suggest([cell("int8", 50, 0.001, top1=0.9)])["kv_format"] is None


def test_the_command_keeps_its_result_beside_the_model(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From one format to a page, a picture and a line in the plan, for this format and no other."""
    out = tmp_path / "out"
    flags = [
        "--lengths",
        "128",
        "--kv-memory",
        "32MiB",
        "--control",
        "none",
        "--haystack",
        "filler",
        "--max-tokens",
        "8",
    ]
    assert main(["plan", str(llama), "--tokens", "128", "--kv-format", "int8"]) == 0
    assert "not measured: longctx eval drift" in capsys.readouterr().out
    assert main(["eval", "drift", str(llama), "--kv-format", "int8,fp32", *flags, "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [cell["format"] for cell in report["cells"]] == ["int8", "fp32"]
    assert {p.name for p in out.iterdir()} == {
        *("config.json", "records.jsonl", "report.json", "report.html", "drift.png")
    }
    assert (out / "drift.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plan", str(llama), "--tokens", "128", "--kv-format", "int8"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"int8: KL {report['cells'][0]['kl']['mean']:.2g} at 128, top-1" in shown and "not measured" not in shown
    assert main(["plan", str(llama), "--tokens", "128", "--kv-format", "fp8_e4m3"]) == 0
    assert "not measured" in capsys.readouterr().out
    assert main(["plan", str(llama), "--tokens", "128", "--kv-format", "bf16"]) == 0
    assert "measured" not in capsys.readouterr().out
    assert main(["eval", "niah", str(llama), "--kv-format", "int8,int4"]) == 2
    assert "eval drift compares several" in capsys.readouterr().err


def test_a_note_is_of_one_model_one_policy_one_mode() -> None:
    key = NoteKey("abc", "m", "int8", "plain")
    assert load_notes(key) == []
    save_note(key, Measured(8192, 3e-4, 0.996, "2026-11-29"))
    save_note(key, Measured(2048, 2e-4, 0.998, "2026-11-28"))
    save_note(key, Measured(2048, 1e-4, 0.999, "2026-11-29"))
    assert [(m.tokens, m.kl) for m in load_notes(key)] == [(2048, 1e-4), (8192, 3e-4)]
    assert drift_line(key) == "int8: KL 0.0003 at 8K, top-1 99.6%, measured 2026-11-29"
    unmeasured = "not measured: longctx eval drift m --kv-format"
    assert drift_line(replace(key, digest="other")) == f"{unmeasured} int8"
    assert drift_line(replace(key, digest=None)) == f"{unmeasured} int8"
    assert drift_line(replace(key, weights="int8")) == f"{unmeasured} int8 --weights int8"
    assert "not measured" in str(drift_line(replace(key, variant="streaming")))
    assert "not measured" in str(drift_line(replace(key, factors="abc")))
    policy = "global:int4,sliding:k:bf16,sliding:v:int8"
    assert drift_line(replace(key, stored=policy)) == f"{unmeasured} {policy}"
    assert drift_line(replace(key, stored="bf16")) is None
    assert drift_line(replace(key, stored="bf16", weights="int8")) == f"{unmeasured} bf16 --weights int8"
    key.path.write_text("{")
    assert "not measured" in str(drift_line(key))
