"""The application over stand-ins: its errors' shape, its routes' states, its schema."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from longctx.server.app import create_app
from longctx.server.messages import Loading
from longctx.server.service import Service
from tests.helpers.server_fakes import FakeClient, make_service, progress

Ask = Callable[[httpx.AsyncClient, Service], Awaitable[None]]


def with_app(ask: Ask, client: FakeClient | None = None, **settings: Any) -> None:
    async def main() -> None:
        service, _, _ = make_service(client, **settings)
        app = create_app(service)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            await ask(http, service)

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "allow"),
    [
        ("GET", "/nosuch", 404, "not_found", None),
        ("GET", "/v1", 404, "not_found", None),
        ("GET", "/v1/models/", 404, "model_not_found", None),
        ("GET", "/health/", 404, "not_found", None),
        ("GET", "/docs", 404, "not_found", None),
        ("POST", "/health", 405, "method_not_allowed", "GET"),
        ("PUT", "/v1/requests/abc", 405, "method_not_allowed", "GET, DELETE"),
        ("GET", "/v1/completions", 405, "method_not_allowed", "POST"),
        ("PATCH", "/v1/jobs", 405, "method_not_allowed", "GET, POST"),
        ("GET", "/v1/requests/abc", 404, "request_not_found", None),
        ("DELETE", "/v1/requests/abc", 404, "request_not_found", None),
        ("GET", "/v1/jobs?limit=x", 422, "invalid_parameter", None),
        ("GET", "/v1/models/other", 404, "model_not_found", None),
    ],
)
def test_every_error_has_openais_shape(method: str, path: str, status: int, code: str, allow: str | None) -> None:
    async def ask(http: httpx.AsyncClient, _: Service) -> None:
        answer = await http.request(method, path)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == code and error["type"] == "invalid_request_error"
        assert answer.headers.get("allow") == allow
        assert answer.headers["x-request-id"]

    with_app(ask)


def test_what_was_sent_is_not_repeated() -> None:
    async def ask(http: httpx.AsyncClient, _: Service) -> None:
        text = (await http.get("/v1/jobs", params={"limit": "SECRET" * 1000})).text
        assert "SECRET" not in text and len(text) < 1000

    with_app(ask)


def test_while_the_model_loads_health_is_good_and_ready_is_not() -> None:
    async def ask(http: httpx.AsyncClient, service: Service) -> None:
        service.start_seconds = None
        health, ready = await http.get("/health"), await http.get("/ready")
        assert health.status_code == 200 and ready.status_code == 503
        assert ready.json()["loading"] == {"stage": "reading weights", "done": 5.0, "total": 10.0}
        assert int(ready.headers["retry-after"]) >= 1
        refused = await http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "model_loading"
        assert (await http.get("/v1/models")).status_code == 503

    with_app(ask, FakeClient(state="starting", info=None, loading=Loading("reading weights", 5.0, 10.0)))


@pytest.mark.parametrize(("state", "status"), [("ready", 200), ("restarting", 503), ("failed", 503), ("stopping", 503)])
def test_ready_is_200_only_when_requests_are_taken(state: str, status: int) -> None:
    async def ask(http: httpx.AsyncClient, service: Service) -> None:
        assert (await http.get("/ready")).status_code == status
        assert (await http.get("/health")).json()["engine"] == state
        service.drain(5)
        assert (await http.get("/ready")).status_code == 503

    with_app(ask, FakeClient(state=state))


def test_a_live_request_can_be_looked_at_and_cancelled() -> None:
    async def ask(http: httpx.AsyncClient, service: Service) -> None:
        client: Any = service.client
        posted = asyncio.create_task(http.post("/v1/completions", json={}, headers={"X-Client-Request-Id": "mine"}))
        while not client.tickets:
            await asyncio.sleep(0.01)
        [(name, ticket)] = client.tickets.items()
        ticket.put(progress(name, processed=4, cached=1, eta_ms=12.0))
        await asyncio.sleep(0.05)
        found = (await http.get("/v1/requests/mine")).json()
        assert (found["stage"], found["total"], found["processed"], found["cache"]) == ("prefill", 10, 4, 1)
        assert found["eta_ms"] == 12.0 and found["client_request_id"] == "mine"
        assert [r["id"] for r in (await http.get("/v1/requests")).json()["data"]] == [found["id"]]
        gone = await http.delete(f"/v1/requests/{found['id']}")
        assert gone.json()["cancelled"] is True and client.cancelled == [name]
        posted.cancel()

    with_app(ask)


def test_a_failure_is_not_told_to_everybody() -> None:
    """Where keys are needed, a health probe has none: it hears the state, and no path or message."""

    async def ask(http: httpx.AsyncClient, service: Service) -> None:
        told = (await http.get("/health")).json()["last_failure"]
        assert told == (None if service.settings.api_keys else "/secret/path broke")

    for keys in ((), ("sk-0123456789",)):
        with_app(ask, FakeClient(last_failure="/secret/path broke"), api_keys=keys)


def test_with_keys_only_probes_page_and_schema_are_open() -> None:
    async def ask(http: httpx.AsyncClient, service: Service) -> None:
        open_paths = []
        for path in schema_of(http)["paths"]:
            answer = await http.get(path.replace("{id}", "x").replace("{name}", "x"))
            if answer.status_code != 401:
                open_paths.append(path)
        assert open_paths == ["/health", "/ready", "/"]
        assert (await http.get("/openapi.json")).status_code == 200

    with_app(ask, api_keys=("sk-0123456789",))


def test_cors_is_off_unless_an_origin_is_given() -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}

    async def closed(http: httpx.AsyncClient, _: Service) -> None:
        answer = await http.options("/v1/completions", headers=preflight)
        assert "access-control-allow-origin" not in answer.headers

    async def opened(http: httpx.AsyncClient, _: Service) -> None:
        answer = await http.options("/v1/completions", headers=preflight)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://a.example"
        refused = await http.get("/v1/models", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"
        foreign = await http.options("/v1/completions", headers={**preflight, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in foreign.headers

    with_app(closed)
    with_app(opened, cors_origins=("https://a.example",), api_keys=("sk-0123456789",))


def schema_of(http: httpx.AsyncClient) -> dict[str, Any]:
    transport = http._transport
    assert isinstance(transport, httpx.ASGITransport) and isinstance(transport.app, FastAPI)
    return transport.app.openapi()


def test_the_schema_names_every_body_and_resolves() -> None:
    async def ask(http: httpx.AsyncClient, _: Service) -> None:
        schema = (await http.get("/openapi.json")).json()
        names = set(schema["components"]["schemas"])
        refs = {part.split('"')[0] for part in json.dumps(schema).split('"#/components/schemas/')[1:]}
        assert refs <= names and {"CompletionRequest", "ChatRequest", "Error"} <= refs
        for path, operations in schema["paths"].items():
            assert "422" not in str(operations.get("post", {}).get("responses")), path
            if "post" in operations:
                assert operations["post"]["requestBody"]["required"], path

    with_app(ask)
