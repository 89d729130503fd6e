"""What is asked beside generation: is it alive, what does it serve, what runs, what would a request take."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from longctx import __version__
from longctx.server.errors import ApiError
from longctx.server.guard import take_body
from longctx.server.openapi import json_body
from longctx.server.registry import Record
from longctx.server.service import Service


def router(service: Service) -> APIRouter:
    """The routes of this module."""
    routes = APIRouter()
    _add_state(routes, service)
    _add_models(routes, service)
    _add_text(routes, service)
    _add_requests(routes, service)
    return routes


def _add_state(routes: APIRouter, service: Service) -> None:
    @routes.get("/health", summary="Whether the process lives, with the state of its engine")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok", **state_of(service)})

    @routes.get("/ready", summary="Whether requests are taken: 200 or 503")
    async def ready() -> JSONResponse:
        headers = {}
        if not service.ready:
            try:
                service.check_open()
            except ApiError as error:
                headers = error.headers()
        status = "ready" if service.ready else "not ready"
        return JSONResponse({"status": status, **state_of(service)}, 200 if service.ready else 503, headers)


def _add_models(routes: APIRouter, service: Service) -> None:
    def model() -> dict[str, Any]:
        info = service.need_info()
        return {
            "id": service.served_name,
            "object": "model",
            "created": service.created,
            "owned_by": "longctx",
            "parent": None,
            "max_model_len": info.max_positions,
            "longest_request": info.longest_request,
            "vocab_size": info.vocab_size,
            "kv_format": info.kv_format,
            "dtype": info.dtype,
            "attention": info.attention,
        }

    @routes.get("/v1/models", summary="The served model")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    # A name may be a path or a hub id, with slashes.
    @routes.get("/v1/models/{name:path}", summary="The served model, by its name")
    async def one_model(name: str) -> dict[str, Any]:
        found = model()
        if name != found["id"]:
            raise ApiError(404, "this server does not serve that model; see /v1/models", code="model_not_found")
        return found


def _add_text(routes: APIRouter, service: Service) -> None:
    @routes.post("/tokenize", openapi_extra=json_body("tokenize"), summary="The token ids of a text or of messages")
    async def tokenize(request: Request) -> Response:
        service.check_open()
        return Response(await service.preparer.tokenize(await take_body(request)), media_type="application/json")

    @routes.post("/detokenize", openapi_extra=json_body("detokenize"), summary="The text of token ids")
    async def detokenize(request: Request) -> Response:
        service.check_open()
        return Response(await service.preparer.detokenize(await take_body(request)), media_type="application/json")

    @routes.post("/v1/plan", openapi_extra=json_body("plan"), summary="What a request would need and take")
    async def plan(request: Request) -> dict[str, Any]:
        service.check_open()
        tokens, concurrency = await service.preparer.plan(await take_body(request))
        return await service.client.plan(tokens, concurrency=concurrency)


def _add_requests(routes: APIRouter, service: Service) -> None:
    def find(request: Request, id: str) -> Record:
        record = service.registry.get(id, tenant_of(request))
        if record is None:
            raise ApiError(404, "no such request: it is not one of yours, or too long ago", code="request_not_found")
        return record

    @routes.get("/v1/requests", summary="What runs, and what ran last")
    async def requests(request: Request, limit: Annotated[int, Query(ge=0)] = 256) -> dict[str, Any]:
        """Everything that runs, and the latest `limit` of what ended."""
        records = service.registry.list(tenant_of(request))
        num_live = sum(not record.finished for record in records)
        return {"object": "list", "data": [record.to_json() for record in records[: num_live + limit]]}

    @routes.get("/v1/requests/{id}", summary="How far a request is")
    async def one_request(request: Request, id: str) -> dict[str, Any]:
        return find(request, id).to_json()

    @routes.delete("/v1/requests/{id}", summary="End a request's work between two layers")
    async def cancel(request: Request, id: str) -> dict[str, Any]:
        record = find(request, id)
        was_live = not record.finished
        service.cancel(record)
        return {**record.to_json(), "cancelled": was_live}


def tenant_of(request: Request) -> str | None:
    """Who asks, as the guard found out."""
    tenant: str | None = request.scope.get("state", {}).get("tenant")
    return tenant


def state_of(service: Service) -> dict[str, Any]:
    """The engine's state, and how far it is while the model loads."""
    client = service.client
    loading = client.loading
    return {
        "version": __version__,
        "engine": client.state,
        "draining": service.draining,
        "restarts": client.restarts,
        # Where anyone may ask this, paths and the like are not told.
        "last_failure": None if service.settings.api_keys else client.last_failure,
        "running_requests": service.registry.num_live,
        "loading": None if loading is None else {"stage": loading.stage, "done": loading.done, "total": loading.total},
    }
