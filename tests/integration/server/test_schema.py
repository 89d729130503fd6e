"""The OpenAPI schema turned into thousands of requests by schemathesis: none may be answered with a 5xx."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.server import LiveServer, idle, until

pytest.importorskip("schemathesis")
pytestmark = pytest.mark.slow  # a minute of requests

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
COMMAND = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
FLAGS = ["--max-examples", "10", "--seed", "1", "--phases", "examples,coverage,fuzzing", "--no-color"]


def test_no_generated_request_is_a_server_error(live: LiveServer, tmp_path: Path) -> None:
    checks = ["--checks", ",".join(CHECKS), "--continue-on-failure", "--generation-database", "none"]
    url = f"{live.url}/openapi.json"
    run = subprocess.run(
        [*COMMAND, url, *FLAGS, *checks], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert run.returncode == 0, run.stdout[-20_000:]
    cases = re.search(r"(\d+) generated", run.stdout)
    assert cases is not None and int(cases[1]) > 500
    with live.client() as client:
        until(lambda: idle(client), 120)
        schema = client.get("/openapi.json").json()
    assert f"{sum(len(methods) for methods in schema['paths'].values())} selected" in run.stdout
    assert "ValidationError" not in json.dumps(schema), "FastAPI's own shape of an error is never sent"
