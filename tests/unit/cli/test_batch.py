"""`longctx run --batch` before and around its engine: which flags go together, what is said, when nothing is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from longctx.cli import batch
from longctx.cli.batch import progress_note
from longctx.cli.run import run
from longctx.errors import LongctxError
from longctx.server.batch import Counts
from longctx.server.batch_file import RequestFile, ResultFile


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "custom_id": "b"}) + "\n")
    return path


def invoke(*args: str) -> Any:
    app = typer.Typer()
    app.command()(run)
    return CliRunner().invoke(app, list(args))


def answer(job: Any, results: ResultFile, requests: RequestFile, names: str) -> None:
    for line in requests.lines:
        if line.custom_id is not None and line.custom_id in names:
            results.append(
                {"id": line.id, "custom_id": line.custom_id, "response": {"status_code": 200}, "error": None}
            )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--prompt x", "--prompt and --batch"),
        ("--prompt-file x", "--prompt-file and --batch"),
        ("--ask x", "--ask and --batch"),
        ("--chat", "--chat or --raw and --batch"),
        ("--raw", "--chat or --raw and --batch"),
        ("--max-tokens 5", "--max-tokens and --batch"),
        ("--temperature 0", "--temperature and --batch"),
        ("--seed 1", "--seed and --batch"),
        ("--stop x", "--stop and --batch"),
        ("--min-p 0", "--min-p and --batch"),
        ("--repetition-penalty 1", "--repetition-penalty and --batch"),
        ("--logprobs 1", "--logprobs and --batch"),
        ("--json", "--json with --batch needs --out"),
        ("--memory-fraction 7", "memory_fraction must be"),
    ],
)
def test_flags_that_do_not_go_with_a_batch(requests: Path, flags: str, said: str) -> None:
    result = invoke("missing", "--batch", str(requests), *flags.split())
    assert isinstance(result.exception, LongctxError) and said in str(result.exception)


def test_out_alone_is_a_mistake() -> None:
    result = invoke("missing", "--prompt", "x", "--out", "y")
    assert isinstance(result.exception, LongctxError) and "--out is for the results of --batch" in str(result.exception)


def test_a_foreign_file_is_refused_before_the_model_is_loaded(requests: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("precious\n")
    result = invoke("missing", "--batch", str(requests), "--out", str(tmp_path / "notes"))
    assert isinstance(result.exception, LongctxError) and "nothing is overwritten" in str(result.exception)
    assert (tmp_path / "notes").read_text() == "precious\n"


def test_nothing_is_loaded_where_nothing_is_left(requests: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    source = RequestFile(str(requests), "missing")
    results = ResultFile(str(out), source)
    answer(None, results, source, "ab")
    results.close()
    before = out.read_bytes()
    result = invoke("missing", "--batch", str(requests), "--out", str(out), "--json")
    assert result.exit_code == 0 and out.read_bytes() == before
    assert "2 requests, 2 of them have a result" in result.stderr and "loading" not in result.stderr
    report = json.loads(result.stdout)
    assert (report["requests"], report["skipped"], report["answered"], report["failed"]) == (2, 2, 0, 0)


@pytest.mark.parametrize(("names", "code"), [("ab", 0), ("a", 130)])
def test_the_report_and_the_exit_code(
    requests: Path, tmp_path: Path, names: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(job: Any, model: str, source: RequestFile, results: ResultFile, console: Any) -> Counts:
        answer(job, results, source, names)
        counts = Counts(2, answered=len(names) - 1, failed=1, prompt_tokens=10, cached_tokens=4, completion_tokens=3)
        assert job.options["memory_fraction"] is None and "max_running" not in job.options
        assert model == "m"
        return counts

    monkeypatch.setattr(batch, "_answer", fake)
    out = str(tmp_path / "out.jsonl")
    result = invoke("m", "--batch", str(requests), "--out", out, "--json")
    assert result.exit_code == code
    assert json.loads(result.stdout) == {
        "out": out,
        "requests": 2,
        "skipped": 0,
        "answered": len(names) - 1,
        "failed": 1,
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert ("1 are left; the same command goes on" in result.stderr) == (code == 130)


def test_progress_says_what_is_done_and_how_fast() -> None:
    counts = Counts(12, answered=3, failed=1, running=2, read=9000, generated=1000)
    note = "4 of 12 requests, 2 running, 1 failed, 9,000 tokens read and 1,000 generated, 1,000 tokens/s"
    assert progress_note(counts, 10.0) == note
    assert "failed" not in progress_note(Counts(1), 0.0) and "tokens/s" not in progress_note(Counts(1), 0.0)
