"""The routes of jobs: post, list, look, read the stream or the result, cancel, forget."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response, StreamingResponse

from longctx.server.errors import ApiError
from longctx.server.generate import warning_header
from longctx.server.guard import take_body
from longctx.server.job_body import PATHS, check_key
from longctx.server.job_store import Job
from longctx.server.jobs import Jobs
from longctx.server.openapi import json_body
from longctx.server.reply_responses import failed_early
from longctx.server.routes_info import tenant_of
from longctx.server.service import Service
from longctx.server.sse import DONE, Departure, EventStream, frame

SLICE_BYTES = 256 * 1024

Status = Literal["queued", "running", "completed", "failed", "cancelled"]


def router(service: Service) -> APIRouter:
    """The routes of this module."""
    routes = APIRouter()
    _add_post(routes, service)
    _add_looks(routes, service)
    _add_answers(routes, service)
    return routes


def _add_post(routes: APIRouter, service: Service) -> None:
    @routes.post(
        "/v1/jobs",
        status_code=202,
        openapi_extra=json_body("jobs"),
        summary="Have a request answered whether or not anyone waits for it",
    )
    async def post_job(request: Request) -> Response:
        service.check_open()
        order = await service.preparer.job(await take_body(request))
        key = check_key(request.headers.get("idempotency-key"), "Idempotency-Key")
        if None not in (key, order.idempotency_key) and key != order.idempotency_key:
            raise ApiError(400, "the header Idempotency-Key and the body's idempotency_key differ: send one of them")
        job, is_new = await service.jobs.create(order, tenant_of(request), key or order.idempotency_key)
        headers = {"location": f"/v1/jobs/{job.id}"}
        if not is_new:
            headers["idempotent-replayed"] = "true"
        if order.warnings:
            headers["x-longctx-warnings"] = warning_header(order.warnings)
        return JSONResponse({**to_json(job, service.jobs), "warnings": list(order.warnings)}, 202, headers)


def _add_looks(routes: APIRouter, service: Service) -> None:
    @routes.get("/v1/jobs", summary="Your jobs, newest first")
    async def list_jobs(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: Annotated[str | None, Query(max_length=100, description="the last job of the page before")] = None,
        status: Status | None = None,
    ) -> dict[str, Any]:
        jobs = service.jobs
        found = await jobs.list(tenant_of(request), limit + 1, after, status)
        data = [to_json(job, jobs) for job in found[:limit]]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(found) > limit,
        }

    @routes.get("/v1/jobs/{id}", summary="How far a job is")
    async def one_job(request: Request, id: str) -> dict[str, Any]:
        return to_json(await service.jobs.get(id, tenant_of(request)), service.jobs)

    @routes.delete("/v1/jobs/{id}", summary="Cancel a job between two layers; forget one that has ended")
    async def delete_job(request: Request, id: str) -> dict[str, Any]:
        job = await service.jobs.cancel(await service.jobs.get(id, tenant_of(request)))
        if job is None:
            return {"id": id, "object": "longctx.job", "deleted": True}
        return to_json(job, service.jobs)


def _add_answers(routes: APIRouter, service: Service) -> None:
    @routes.get("/v1/jobs/{id}/result", summary="What the endpoint would have answered")
    async def result(request: Request, id: str) -> Response:
        data = await service.jobs.result(await service.jobs.get(id, tenant_of(request)))
        headers = {"content-length": str(len(data))}
        return StreamingResponse(_slices(data), media_type="application/json", headers=headers)

    @routes.get(
        "/v1/jobs/{id}/stream",
        response_class=Response,
        summary="The endpoint's stream from its start, or from after the header Last-Event-ID, until the job ends",
    )
    async def stream(request: Request, id: str) -> Response:
        job = await service.jobs.get(id, tenant_of(request))
        frames = _frames(service.jobs, job, request.headers.get("last-event-id"))
        return EventStream(frames, Departure(request.receive), ping_s=service.settings.ping_s)


async def _frames(jobs: Jobs, job: Job, place: str | None) -> AsyncGenerator[bytes, None]:
    """A job's stream as server-sent events, each with the place after it as its id; the failure of one that failed."""
    pieces = jobs.follow(job, place)
    try:
        async for piece in pieces:
            yield piece.data if piece.place is None else f"id: {piece.place}\n".encode() + piece.data
    except ApiError as error:
        yield frame(failed_early(error) if job.endpoint == "responses" else error.body())
    finally:
        await pieces.aclose()
    if job.endpoint != "responses":  # whose last event says that it is the last
        yield DONE


async def _slices(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), SLICE_BYTES):
        yield data[start : start + SLICE_BYTES]


def to_json(job: Job, jobs: Jobs) -> dict[str, Any]:
    """The body of `GET /v1/jobs/{id}`. Times are whole seconds since 1970."""
    error = None if job.error is None else ApiError(**job.error).body()["error"]
    return {
        "id": job.id,
        "object": "longctx.job",
        "endpoint": PATHS[job.endpoint],
        "status": job.state,
        "created_at": int(job.created),
        "started_at": _seconds(job.started),
        "finished_at": _seconds(job.finished),
        "expires_at": _seconds(job.expires),
        "attempts": job.attempts,
        "jobs_before": jobs.place(job),
        "idempotency_key": job.idempotency_key,
        "progress": jobs.progress(job),
        "usage": job.usage,
        "error": error,
    }


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)
