"""`bench serve` on a tiny model's real server: every load runs, nothing is lost, and a loss would be seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longctx.evals.bench import serve
from longctx.evals.bench.job import Job
from longctx.evals.bench.limits import FLOPS_PARTS, READ_PARTS, Limits
from longctx.evals.bench.main import run_bench
from longctx.evals.bench.runs import median
from tests.helpers.server import save_tiny

LIMITS = Limits(2e11, 2e10, {**dict.fromkeys(FLOPS_PARTS, 2e11), **dict.fromkeys(READ_PARTS, 2e10)})


def bench(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path))
    monkeypatch.setattr(serve, "BODY_BYTES", 200_000)
    monkeypatch.setattr(serve, "MIXED_REQUESTS", 24)
    return run_bench(serve.BENCH, Job(str(folder), lengths=(2048,)), lambda: LIMITS)


@pytest.mark.slow
def test_every_load_runs_and_nothing_is_left(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path_factory.mktemp("model"))
    report = bench(folder, monkeypatch, tmp_path)
    beside, huge, mixed = report["rows"]
    assert report["failure"] is None
    assert beside["completions_beside"] > 0 and median([beside["itl_alone_p50_s"], beside["itl_beside_p50_s"]]) > 0
    assert huge["body_status"] == 400 and huge["progress_monotone"] and huge["progress_complete"]
    assert huge["cancel_to_next_s"] > 0 and huge["health_p99_s"] > 0
    assert mixed["lost"] == 0 and mixed["held_bytes_after"] == 0 and mixed["left_early"] > 0


@pytest.mark.slow
def test_a_lost_request_fails_the_run(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path_factory.mktemp("model"))
    monkeypatch.setattr(serve, "_beside", lambda *_: {})
    monkeypatch.setattr(serve, "_huge_body", lambda *_: {})
    real = serve._mixed
    monkeypatch.setattr(serve, "_mixed", lambda *args: {**real(*args), "lost": 1})
    assert "1 of 24 requests were lost" in str(bench(folder, monkeypatch, tmp_path)["failure"])
