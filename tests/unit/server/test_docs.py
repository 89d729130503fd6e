"""The page about the server names what there is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "server.md").read_text()
SOURCES = [*sorted((ROOT / "longctx" / "server").glob("*.py")), ROOT / "longctx" / "errors.py"]

CODE = re.compile(
    r'code ?= ?"(\w+)"|from_code\("(\w+)"|"((?:unsupported|invalid|unknown|missing|context)_\w+)(?<!_error)"\)'
)
PATH = re.compile(r'routes\.(?:get|post|delete)\(\s*"([^"]+)"')


def test_every_error_code_is_on_the_page() -> None:
    codes = {code for file in SOURCES for groups in CODE.findall(file.read_text()) for code in groups if code}
    assert {"queue_full", "context_length_exceeded", "unknown_parameter", "job_not_found"} <= codes
    assert [code for code in sorted(codes) if f"`{code}`" not in PAGE] == []


def test_every_path_is_on_the_page() -> None:
    paths = {path for file in SOURCES for path in PATH.findall(file.read_text())}
    assert {"/v1/jobs/{id}/stream", "/health", "/metrics"} <= paths
    # Those below a job are written as they are used.
    short = {path: path.replace("/v1/jobs/{id}", "..", 1) for path in paths}
    assert [p for p in sorted(paths) if p.replace(":path", "") not in PAGE and short[p] not in PAGE] == []
