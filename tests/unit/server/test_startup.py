"""What the server says when it is ready: true numbers, one line each, and never a key."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import APIRouter, FastAPI

from longctx.config import SchedulerConfig
from longctx.server import logs, startup
from longctx.server.messages import ModelInfo
from longctx.server.settings import ServerSettings

PLAN = {
    "weight_bytes": 1_000_000_000,
    "workspace_bytes": 200_000_000,
    "process_bytes": 500_000_000,
    "pool_bytes": 2_000_000_000,
    "peak_bytes": 3_700_000_000,
    "bytes_per_token": 24_576,
    "scale_bytes_per_token": 0,
    "requests_that_fit": 3,
}
INFO = ModelInfo(
    model="some-model",
    folder="folder",
    vocab_size=262_144,
    max_positions=32_768,
    longest_request=32_768,
    dtype="float32",
    kv_format="fp32",
    weight_bytes=1_000_000_000,
    workspace_bytes=200_000_000,
    pool_bytes=2_000_000_000,
    block_tokens=256,
    eos_token_ids=(1,),
    plan=PLAN,
)
SETTINGS = ServerSettings(api_keys=("very-secret",), jobs_dir=Path("jobs"))


def app() -> FastAPI:
    app, router = FastAPI(), APIRouter()

    @router.post("/v1/completions")
    def post() -> None: ...

    @router.get("/v1/requests/{id}")
    def get() -> None: ...

    @router.delete("/v1/requests/{id}")
    def delete() -> None: ...

    app.include_router(router)
    return app


def table(settings: ServerSettings = SETTINGS, info: ModelInfo = INFO) -> str:
    rows = startup.table_rows(settings, info, SchedulerConfig(), ["POST /a", "GET /b"], start_seconds=12.0)
    return startup.start_table("http://127.0.0.1:8000", settings.served_name or info.model, rows)


def test_a_lossy_variant_has_a_line_of_its_own() -> None:
    assert "attention" not in table()
    shown = table(info=replace(INFO, attention="streaming, lossy: less is seen"))
    assert "  attention  streaming, lossy: less is seen\n" in shown


def test_what_was_measured_of_a_lossy_format_stands_under_it() -> None:
    shown = table(info=replace(INFO, kv_format="int8", drift="int8: KL 0.0003 at 8K"))
    assert "24,576 bytes per token\n             int8: KL 0.0003 at 8K\n  memory" in shown
    assert "KL" not in table()


@pytest.fixture
def json_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    monkeypatch.setenv(logs.FORMAT_VARIABLE, "")
    root = logging.getLogger()
    before, level, stream = root.handlers[:], root.level, io.StringIO()
    logs.configure("json", stream=stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def test_the_table_has_every_part() -> None:
    text = table()
    assert text.startswith("longctx serves some-model at http://127.0.0.1:8000\n")
    for part in (
        "  model      some-model, 32,768 positions, vocabulary 262,144, float32, loaded in 12.0 s",
        "  formats    KV fp32 in blocks of 256 tokens, 24,576 bytes per token",
        "  memory     weights 1.00 GB + workspace 200 MB + process 500 MB + KV pool 2.00 GB = 3.70 GB",
        "  tiers      g1 device 2.00 GB: requests of up to 32,768 tokens, 3 of that length at a time",
        "  limits     8 running, 1,024 queued; body 67.1 MB, headers 32.8 kB; no time limit; ",
        "  access     1 API key; CORS off",
        "  jobs       in jobs, up to 1,000, kept 7 days",
        "  endpoints  POST /a",
        "             GET /b",
    ):
        assert f"\n{part}" in text, part


def test_a_key_is_counted_and_never_shown(json_logs: io.StringIO) -> None:
    startup.announce("u", replace(SETTINGS, log_format="json"), INFO, SchedulerConfig(), app().openapi())
    assert "very-secret" not in table() + json_logs.getvalue()
    assert json.loads(json_logs.getvalue())["num_api_keys"] == 1


@pytest.mark.parametrize(
    ("host", "keys", "says"),
    [
        ("127.0.0.1", (), "no API key, this machine only"),
        ("::1", (), "no API key, this machine only"),
        ("localhost", (), "no API key, this machine only"),
        ("0.0.0.0", (), "no API key: anyone who reaches 0.0.0.0 may use it"),
        ("0.0.0.0", ("a", "b"), "2 API keys"),
    ],
)
def test_who_may_use_it(host: str, keys: tuple[str, ...], says: str) -> None:
    assert says in table(ServerSettings(host=host, api_keys=keys))


def test_a_pool_too_small_for_the_model_is_said() -> None:
    text = table(info=replace(INFO, longest_request=30_000))
    assert "requests of up to 30,000 tokens, 2,768 fewer than the model has positions" in text


def test_a_load_peak_above_all_the_rest_is_said() -> None:
    assert "while loading" not in table()
    assert "peak 4.50 GB, while loading" in table(info=replace(INFO, plan={**PLAN, "peak_bytes": 4_500_000_000}))


def test_no_jobs_no_line() -> None:
    assert "  jobs" not in table(ServerSettings())


def test_endpoints_are_the_apps_own() -> None:
    assert startup.endpoints_of(app().openapi()) == ["POST /v1/completions", "GET DELETE /v1/requests/{id}"]


def test_text_is_printed_and_json_is_logged(json_logs: io.StringIO) -> None:
    out = io.StringIO()
    startup.announce("http://x", SETTINGS, INFO, SchedulerConfig(), app().openapi(), stream=out)
    assert "POST /v1/completions" in out.getvalue()
    assert json_logs.getvalue() == ""
    startup.announce("http://x", replace(SETTINGS, log_format="json"), INFO, SchedulerConfig(), app().openapi())
    record = json.loads(json_logs.getvalue())
    assert record["message"] == "ready"
    assert record["url"] == "http://x"
    assert record["pool_bytes"] == 2_000_000_000
    assert record["endpoints"] == ["POST /v1/completions", "GET DELETE /v1/requests/{id}"]
