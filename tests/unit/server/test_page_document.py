"""The page as it is sent: one document, nothing from elsewhere, a policy that lets only its own script run."""

from __future__ import annotations

import base64
import hashlib
import re
from types import SimpleNamespace
from typing import cast

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from longctx.server import page
from longctx.server.messages import EngineStats, ModelInfo
from longctx.server.metrics import Metrics
from longctx.server.service import Service
from tests.helpers.server_fakes import FakeJobs

SHOWN = page.build_page()
INFO = ModelInfo("some-model", "folder", 10, 10, 10, "float32", "fp32", 1, 1, 1, 16, (), {})


@pytest.fixture
def engine() -> SimpleNamespace:
    return SimpleNamespace(state="ready", stats=None, restarts=0, info=INFO)


@pytest.fixture
def client(engine: SimpleNamespace) -> TestClient:
    app = FastAPI()
    service = SimpleNamespace(client=engine, metrics=Metrics(), jobs=FakeJobs({"queued": 2}))
    app.include_router(page.router(cast(Service, service)))
    return TestClient(app)


def policy() -> dict[str, str]:
    header = SHOWN.headers["Content-Security-Policy"]
    return dict(directive.split(" ", 1) for directive in header.split("; "))


@pytest.mark.parametrize("tag", ["script", "style"])
def test_the_policy_allows_exactly_the_inline_text(tag: str) -> None:
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", SHOWN.body.decode(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    assert policy()[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_policy_allows_nothing_else() -> None:
    assert policy()["default-src"] == "'none'"
    assert policy()["connect-src"] == "'self'"
    assert "unsafe" not in SHOWN.headers["Content-Security-Policy"]
    assert "http" not in SHOWN.headers["Content-Security-Policy"]


def test_the_document_names_no_other_host() -> None:
    """An XML namespace is a name, not an address that anyone loads."""
    names = {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"https?://[^\s'\"<>)]+", SHOWN.body.decode())) <= names
    assert not re.search(r"""(src|href)=["']?//""", SHOWN.body.decode())
    assert "@import" not in SHOWN.body.decode()


def test_the_document_needs_no_inline_handlers_or_styles() -> None:
    """The policy would refuse them, silently for whoever writes them."""
    html = (page.STATIC / "page.html").read_text()
    assert not re.search(r"\s(on\w+|style)=", html)


@pytest.mark.parametrize("name", page.SCRIPTS)
def test_no_script_makes_markup_from_text(name: str) -> None:
    source = (page.STATIC / f"{name}.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", source)


def test_every_static_file_is_part_of_the_page() -> None:
    used = {"page.html", "page.css", *(f"{name}.js" for name in page.SCRIPTS)}
    assert {path.name for path in page.STATIC.iterdir()} == used


def test_ids_are_unique_and_those_asked_for_exist() -> None:
    html = (page.STATIC / "page.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    scripts = "\n".join((page.STATIC / f"{name}.js").read_text() for name in page.SCRIPTS)
    assert set(re.findall(r'byId\("([^"]+)"\)', scripts)) <= set(ids)
    assert set(re.findall(r'(?:for|aria-\w+by)="([^"]+)"', html)) <= set(ids)


def test_the_page_is_sent_once_and_then_only_when_it_changed(client: TestClient) -> None:
    first = client.get("/")
    assert first.status_code == 200
    assert first.headers["content-type"] == "text/html; charset=utf-8"
    assert first.content == SHOWN.body
    for name in ("content-security-policy", "x-content-type-options", "x-frame-options", "referrer-policy"):
        assert name in first.headers
    again = client.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/", headers={"If-None-Match": '"other"'}).status_code == 200


def test_metrics_before_an_engine_has_said_anything(client: TestClient) -> None:
    body = client.get("/metrics")
    assert body.headers["content-type"].startswith("text/plain; version=")
    assert "longctx_engine_up 1.0" in body.text
    assert 'longctx_model_info{dtype="float32",kv_format="fp32",model="some-model"} 1.0' in body.text


def test_metrics_take_the_latest_snapshot(client: TestClient, engine: SimpleNamespace) -> None:
    engine.stats = EngineStats(2, 3, {"g1": {"held": 1, "cached": 2, "cap": 10}}, {"steps": 5}, engine=7)
    for _ in range(2):
        text = client.get("/metrics").text
    assert "longctx_steps_total 5.0" in text
    assert "longctx_requests_running 2.0" in text
    assert 'longctx_jobs{state="queued"} 2.0' in text
    assert 'longctx_kv_bytes{state="free",tier="g1"} 7.0' in text
    engine.state, engine.restarts = "restarting", 1
    text = client.get("/metrics").text
    assert "longctx_engine_up 0.0" in text
    assert "longctx_requests_running 0.0" in text
    assert "longctx_engine_restarts_total 1.0" in text
    assert "longctx_steps_total 5.0" in text
