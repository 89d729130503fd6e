"""The routes that generate: completions, chats and responses, streamed or whole."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.datastructures import State
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from longctx.server.errors import ApiError
from longctx.server.guard import take_body
from longctx.server.json_pieces import json_pieces
from longctx.server.openapi import json_body
from longctx.server.prepare_pool import SMALL_BODY_BYTES
from longctx.server.reply import Reply, tokenizing
from longctx.server.reply_responses import failed_early
from longctx.server.running import Running
from longctx.server.service import Service
from longctx.server.sse import DONE, Departure, EventStream, end, frame
from longctx.server.work import ReplyOptions

log = logging.getLogger(__name__)

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses"}

LARGE_BODY_BYTES = 2**20
"""Up to here a stream's fields are checked, which takes milliseconds, before its head may leave."""

HEAD_S, PATIENCE_S = 0.1, 5.0
"""A stream's head leaves after `HEAD_S`, though its text is still being read. A small body's waits for the verdict of
a ready engine, which comes at once: a refusal is told better by a status than in the stream."""

EDGE_BYTES = 64 * 1024
"""Where a large body's short fields are: its one long field is a prompt or messages."""

SLICE_BYTES = 256 * 1024

_STREAM = re.compile(rb'(?<!\\)"stream"\s*:\s*true')
_PROGRESS = re.compile(rb'(?<!\\)"return_progress"\s*:\s*true')


def router(service: Service) -> APIRouter:
    """The routes of this module."""
    routes = APIRouter()
    for endpoint, path in PATHS.items():
        _add(routes, service, endpoint, path)
    return routes


def _add(routes: APIRouter, service: Service, endpoint: str, path: str) -> None:
    async def generate(request: Request) -> Response:
        body = await take_body(request)
        departure = Departure(request.receive)
        try:
            return await _answer(service, endpoint, request, body, departure)
        except ClientDisconnect:
            return Response(status_code=499)
        except BaseException:
            departure.close()
            raise

    routes.add_api_route(
        path,
        generate,
        methods=["POST"],
        name=endpoint,
        summary=f"OpenAI's {path}, streamed or not",
        responses={200: {"description": "The answer", "content": {"application/json": {}, "text/event-stream": {}}}},
        openapi_extra=json_body(endpoint),
    )


async def _answer(
    service: Service, endpoint: str, request: Request, body: bytes | bytearray, departure: Departure
) -> Response:
    """The response to one body. A stream closes the departure when it ends; a whole answer is made by then."""
    state, ping_s, arrival_s = request.state, service.settings.ping_s, time.monotonic()
    edges = bytes(body) if len(body) <= LARGE_BODY_BYTES else bytes(body[:EDGE_BYTES]) + bytes(body[-EDGE_BYTES:])
    is_stream, is_small = _STREAM.search(edges) is not None, len(body) <= SMALL_BODY_BYTES
    wait_s = None if not is_stream else PATIENCE_S if is_small and service.ready else HEAD_S
    headers: dict[str, str] = {}
    checked: asyncio.Future[ReplyOptions] = asyncio.get_running_loop().create_future()
    check_first = is_stream and not is_small and len(body) <= LARGE_BODY_BYTES
    identity = {"tenant": state.tenant, "request_id": state.request_id, "alias": state.client_request_id}
    beginning = asyncio.ensure_future(
        service.begin(endpoint, body, checked=checked if check_first else None, **identity)
    )
    del body  # megabytes, which whoever reads them may drop early
    try:
        if check_first and await departure.wait_for(checked, beginning) and checked.done():
            headers = _headers(checked.result())
            wait_s = max(0.0, arrival_s + HEAD_S - time.monotonic()) if checked.result().stream else None
        is_begun = await departure.wait_for(beginning, timeout_s=wait_s)
    except BaseException:
        await _abandon(beginning)
        raise
    if departure.happened:
        await _abandon(beginning)
        raise ClientDisconnect
    if not is_begun:
        first = _tokenizing(service, endpoint, state) if _PROGRESS.search(edges) else None
        frames = _late_frames(service, endpoint, beginning, first)
        return EventStream(frames, departure, ping_s=ping_s, headers=headers)
    running = beginning.result()
    options, reply = running.prepared.options, Reply(running)
    headers = _headers(options)
    if options.stream:
        return EventStream(frames_of(service, reply, endpoint), departure, ping_s=ping_s, headers=headers)
    try:
        whole = await departure.race(reply.collect())
    except ApiError as error:
        raise _why(service, error) from None
    finally:
        departure.close()
    return await _json_response(whole, headers)


async def _abandon(beginning: asyncio.Future[Running]) -> None:
    """End what was begun for a client that has left, wherever it stands."""
    await end(beginning)
    if not beginning.cancelled() and beginning.exception() is None:
        beginning.result().cancel()


def _why(service: Service, error: ApiError) -> ApiError:
    """A request that a stopping server cancelled may be sent again, which its client should know."""
    if error.code == "cancelled" and service.draining:
        return ApiError.from_code("draining", "the server is shutting down and ended this request: send it again")
    return error


# -- streams ---------------------------------------------------------------------------------------------------------


async def frames_of(service: Service, reply: Reply, endpoint: str) -> AsyncGenerator[bytes, None]:
    """A whole stream, its failure included. Closing it early cancels the request."""
    try:
        async with aclosing(reply.chunks()) as chunks:
            async for chunk in chunks:
                yield frame(chunk)
    except ApiError as error:
        for chunk in reply.failure(_why(service, error)):
            yield frame(chunk)
    except Exception:
        log.exception("a stream failed")
        for chunk in reply.failure(ApiError(500, "the server failed; its log says why", type="server_error")):
            yield frame(chunk)
    if endpoint != "responses":  # whose last event says that it is the last
        yield DONE


async def _late_frames(
    service: Service, endpoint: str, beginning: asyncio.Future[Running], told: dict[str, Any] | None
) -> AsyncGenerator[bytes, None]:
    """A stream whose head has left before its body was read: what is wrong with the body is an event."""
    try:
        if told is not None:
            yield frame(told)
        running = await beginning
    except ApiError as error:
        yield frame(failed_early(error) if endpoint == "responses" else error.body())
        if endpoint != "responses":
            yield DONE
        return
    except BaseException:
        await _abandon(beginning)
        raise
    reply = Reply(running)
    if running.prepared.options.stream:
        async with aclosing(frames_of(service, reply, endpoint)) as frames:
            async for data in frames:
                yield data
        return
    # "stream" stood somewhere in the body where it does not count.
    try:
        yield frame(await reply.collect())
    except ApiError as error:
        yield frame(error.body())


def _tokenizing(service: Service, endpoint: str, state: State) -> dict[str, Any] | None:
    record = service.registry.get(state.request_id, state.tenant)
    if record is None or endpoint == "responses":
        return None
    return tokenizing(endpoint, service.served_name, record.id, record.created)


# -- whole answers ---------------------------------------------------------------------------------------------------


async def _json_response(whole: dict[str, Any], headers: dict[str, str]) -> Response:
    """The object as a response; a large one is written in a thread and sent slice by slice."""
    slices = _slices(whole)

    def following() -> bytes | None:
        return next(slices, None)

    first, second = await asyncio.to_thread(lambda: (following() or b"", following()))
    if second is None:
        return Response(first, media_type="application/json", headers=headers)

    async def sent() -> AsyncIterator[bytes]:
        yield first
        data: bytes | None = second
        while data is not None:
            yield data
            data = await asyncio.to_thread(following)

    return StreamingResponse(sent(), media_type="application/json", headers=headers)


def _slices(whole: dict[str, Any]) -> Iterator[bytes]:
    """The JSON in slices of about `SLICE_BYTES`."""
    gathered: list[bytes] = []
    size = 0
    for piece in json_pieces(whole):
        gathered.append(piece)
        size += len(piece)
        if size >= SLICE_BYTES:
            yield b"".join(gathered)
            gathered, size = [], 0
    yield b"".join(gathered)


def _headers(options: ReplyOptions) -> dict[str, str]:
    return {"x-longctx-warnings": warning_header(options.warnings)} if options.warnings else {}


def warning_header(warnings: tuple[str, ...]) -> str:
    """Warnings as a header's value: printable ASCII, and not so long that a client refuses it."""
    text = "; ".join(warnings)[:1000]
    return "".join(char if " " <= char <= "~" else "?" for char in text)
