"""Listens, serves, and stops in order: first no new requests, then those that run may end, then all is ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from longctx.config import EngineConfig
from longctx.server.address import url_of
from longctx.server.app import build_service, create_app
from longctx.server.client import EngineClient
from longctx.server.connection import connection_class
from longctx.server.logs import log_event
from longctx.server.service import Service
from longctx.server.settings import ServerSettings
from longctx.server.startup import announce, is_loopback

log = logging.getLogger(__name__)

CANCEL_S = 10.0
"""What cancelled requests may take to end, and finished answers to be sent, before connections are cut."""


class HttpServer(uvicorn.Server):
    """uvicorn with an orderly stop: the first signal drains the service, the second one ends everything at once."""

    def __init__(self, service: Service, app: FastAPI):
        settings = service.settings
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=connection_class(settings.max_header_bytes, settings.head_timeout_s),
                ws="none",
                lifespan="on",
                log_config=None,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=settings.keep_alive_s,
                timeout_graceful_shutdown=int(CANCEL_S),
            )
        )
        self._service = service
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop_on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def stop_on_signal(self, number: int) -> None:
        """Begin to stop, or stop at once when asked again."""
        name = signal.Signals(number).name
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain(name))
        else:
            log_event(log, "stopping at once", signal=name)
            self._service.cancel_all()
            self.should_exit = self.force_exit = True

    async def _drain(self, name: str) -> None:
        service, drain_s = self._service, self._service.settings.drain_s
        log_event(log, "stopping: no new requests", signal=name, running=service.registry.num_live, drain_s=drain_s)
        service.drain(drain_s)
        try:
            await service.jobs.suspend()
            async with asyncio.timeout(drain_s):
                await service.wait_idle()
        except TimeoutError:
            log_event(log, "cancelling what still runs", running=service.registry.num_live)
            service.cancel_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    await service.wait_idle()
        finally:
            self.should_exit = True


async def serve(
    settings: ServerSettings,
    config: EngineConfig,
    sock: socket.socket,
    client: EngineClient,
    starting: asyncio.Task[None],
) -> None:
    """Serve on `sock` until a signal ends it; raises the error with which the service could not start.

    `starting` is the start of the `client`, which may have begun long before this module was imported.
    """
    service = build_service(settings, client, starting)
    app = create_app(service)
    server, url = HttpServer(service, app), url_of(sock)
    log_event(log, "listening while the model loads", url=url)
    if not is_loopback(settings.host) and not settings.api_keys:
        log.warning("anyone who reaches %s may use this server: give --api-key-file, or --host 127.0.0.1", url)
    watching = asyncio.create_task(_announce(service, app, server, url, config))
    try:
        await server.serve(sockets=[sock])
    finally:
        watching.cancel()
        await service.stop()
    if service.failure is not None:
        raise service.failure


async def _announce(service: Service, app: FastAPI, server: HttpServer, url: str, config: EngineConfig) -> None:
    """Say that the server is ready, or end it when it cannot be."""
    await service.settled.wait()
    if service.failure is not None:
        server.should_exit = True
    elif service.ready:
        info, seconds = service.need_info(), service.start_seconds
        announce(url, service.settings, info, config.scheduler, app.openapi(), start_seconds=seconds)
