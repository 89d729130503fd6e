"""The one thread that touches the jobs on disk, so that the event loop never waits for it."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from longctx.server.errors import ApiError
from longctx.server.job_store import JobStore, StoreError

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

RETRY_S = 2.0


class JobThread:
    """A `JobStore` used from the event loop, one call after the other: `await thread(JobStore.get, id)`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="longctx-jobs")
        self._store: JobStore | None = None
        self._failing = False

    async def open(self, folder: Path) -> None:
        """Raises `LongctxError` for a folder that cannot be used."""
        self._store = await asyncio.get_running_loop().run_in_executor(self._thread, JobStore, folder)

    async def close(self) -> None:
        """After every call before it."""
        store, self._store = self._store, None
        if store is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, store.close)
        self._thread.shutdown(wait=False)

    async def __call__(self, method: Callable[Concatenate[JobStore, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the store's method returns; a disk that fails is an `ApiError`."""
        try:
            return await self._run(method, *args, **kwargs)
        except StoreError as error:
            log.error("%s", error.message)
            raise ApiError(503, error.message, type="server_error", code="jobs_unavailable") from error

    async def insist(self, method: Callable[Concatenate[JobStore, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Try until the disk does it: what a job has reached is worth waiting for somebody to free some space."""
        while True:
            try:
                result = await self._run(method, *args, **kwargs)
            except StoreError as error:
                if not self._failing:
                    log.error("%s; trying again until it works", error.message)
                self._failing = True
                await asyncio.sleep(RETRY_S)
            else:
                if self._failing:
                    log.warning("the jobs can be written again")
                self._failing = False
                return result

    async def _run(self, method: Callable[Concatenate[JobStore, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._store is None:
            raise ApiError(503, "the server is starting or stopping", type="server_error", code="jobs_unavailable")
        call = functools.partial(method, self._store, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
