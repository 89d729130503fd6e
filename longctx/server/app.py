"""The HTTP application: the service's parts, its routes, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from longctx import __version__
from longctx.server import generate, openapi, page, routes_info, routes_jobs
from longctx.server.client import EngineClient
from longctx.server.errors import ApiError
from longctx.server.guard import Guard
from longctx.server.jobs import Jobs
from longctx.server.metrics import Metrics
from longctx.server.prepare_pool import Preparer
from longctx.server.service import Service
from longctx.server.settings import ServerSettings

METHODS = ("GET", "POST", "DELETE")
"""All that routes here have."""


def build_service(
    settings: ServerSettings, client: EngineClient, starting: asyncio.Task[None] | None = None
) -> Service:
    """All parts of the HTTP process; but for a `client` that is `starting`, nothing is started yet."""
    service = Service(settings, client, Preparer(settings), Metrics(), starting)
    service.jobs = Jobs(service)
    return service


def create_app(service: Service) -> FastAPI:
    """The application. It answers while the service starts; its lifespan starts and stops the service."""
    app = FastAPI(
        title="longctx",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lambda _: _lifespan(service),
    )
    for module in (generate, routes_info, routes_jobs, page):
        app.include_router(module.router(service))
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    openapi.install(app, __version__)
    app.add_middleware(Guard, settings=service.settings, metrics=service.metrics)
    if service.settings.cors_origins:
        # Outside of the guard: a browser's preflight has no key, and a refusal must be readable too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.settings.cors_origins),
            allow_methods=list(METHODS),
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-longctx-warnings", "retry-after"],
        )
    return app


@asynccontextmanager
async def _lifespan(service: Service) -> AsyncIterator[None]:
    starting = asyncio.create_task(service.start())
    try:
        yield
    finally:
        starting.cancel()
        await service.stop()


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as the answer to a request."""
    return JSONResponse(error.body(), error.status, {**(headers or {}), **error.headers()})


async def _on_api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == 404:
        shown = ApiError(404, "there is nothing at this path; /openapi.json lists what there is", code="not_found")
    elif error.status_code == 405:
        headers["allow"] = ", ".join(_methods_at(request))
        message = f"{request.method} is not possible here; use {headers['allow']}"
        shown = ApiError(405, message, code="method_not_allowed")
    else:
        shown = ApiError(error.status_code, str(error.detail))
    return error_response(shown, headers)


def _methods_at(request: Request) -> list[str]:
    """Every method of a path: its methods are routes of their own, of which the router names only the first."""
    routes, scope = request.app.routes, dict(request.scope)
    return [m for m in METHODS if any(route.matches({**scope, "method": m})[0] is Match.FULL for route in routes)]


async def _on_invalid(_: Request, error: Exception) -> JSONResponse:
    """A path or query parameter of the wrong kind. What was sent is not repeated."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:])[:200] or None
    return error_response(ApiError(422, f"{param}: {first['msg']}"[:500], code="invalid_parameter", param=param))
