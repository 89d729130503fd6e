"""The page at `/`: one document without outside resources, and `/metrics` beside it, which it draws."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response

from longctx.server.service import Service

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("format", "view", "api", "pace", "gauges", "requests", "last", "live", "plan", "try", "main")
"""The parts of the page's one script, in the order in which they need each other."""


@dataclass(frozen=True)
class Page:
    """The document as it is sent, and its headers, which let it run what it has inside and nothing else."""

    body: bytes
    headers: dict[str, str]


def build_page(folder: Path = STATIC) -> Page:
    """Put style and script into the document; the policy names both by their hashes."""
    style = (folder / "page.css").read_text("utf-8")
    parts = [(folder / f"{name}.js").read_text("utf-8") for name in SCRIPTS]
    script = "\n".join(['"use strict";', "{", *parts, "}", ""])
    html = (folder / "page.html").read_text("utf-8")
    for tag, text in (("style", style), ("script", script)):
        assert html.count(f"<{tag}></{tag}>") == 1 and f"</{tag}" not in text
        html = html.replace(f"<{tag}></{tag}>", f"<{tag}>{text}</{tag}>")
    body = html.encode()
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of(script),
        "style-src": _hash_of(style),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        # The browser itself refuses markup made from text, wherever the script might try.
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        # A new version of the server has a new page: ask each time, but send it only when it changed.
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return Page(body, headers)


def router(service: Service) -> APIRouter:
    """`GET /` and `GET /metrics`."""
    routes, shown = APIRouter(), build_page()

    @routes.get("/", response_class=HTMLResponse, summary="What runs, as a page for people")
    async def page(request: Request) -> Response:
        if request.headers.get("if-none-match") == shown.headers["ETag"]:
            return Response(status_code=304, headers=shown.headers)
        return HTMLResponse(shown.body, headers=shown.headers)

    @routes.get("/metrics", response_class=PlainTextResponse, summary="Counters and timings for Prometheus")
    async def metrics() -> Response:
        client = service.client
        if client.stats is not None:
            service.metrics.observe_stats(client.stats)
        service.metrics.observe_jobs(await service.jobs.counts())
        service.metrics.observe_engine(ready=client.state == "ready", restarts=client.restarts, info=client.info)
        body, content_type = service.metrics.render()
        return Response(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    return routes


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
