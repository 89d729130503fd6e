"""What clients ask of jobs: cancelling, keys, bounds, tenants, expiry."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from longctx.errors import LongctxError
from longctx.server.errors import ApiError
from longctx.server.job_store import JobStore, StoreError
from longctx.server.jobs import Jobs
from tests.helpers.fake_running import said
from tests.helpers.jobs import (
    WAIT_S,
    Host,
    Work,
    answer,
    eventually,
    go,
    order,
    post,
    running,
    stream,
    until,
)
from tests.helpers.jobs import short_pauses as short_pauses


def test_a_waiting_and_a_running_job_can_be_cancelled_and_forgotten(tmp_path: Path) -> None:
    async def main() -> None:
        gate = asyncio.Event()
        async with running(tmp_path, lambda _: answer("x", gate), max_running_jobs=1) as (jobs, host):
            runs, waits = await post(jobs), await post(jobs)
            runs = await until(jobs, runs, "running")
            reading = asyncio.create_task(stream(jobs, runs))
            await asyncio.sleep(0)
            for job in (waits, runs):
                ended = await jobs.cancel(await jobs.get(job.id, None))
                assert ended is not None and ended.state == "cancelled"
            assert await reading == ["job_cancelled"]
            await eventually(lambda: host.works[0].cancelled)
            assert len(host.begun) == 1, "what waited never began"
            with pytest.raises(ApiError) as error:
                await jobs.result(await jobs.get(runs.id, None))
            assert (error.value.status, error.value.code) == (409, "job_cancelled")
            assert await jobs.cancel(await jobs.get(runs.id, None)) is None
            with pytest.raises(ApiError) as error:
                await jobs.get(runs.id, None)
            assert (error.value.status, error.value.code) == (404, "job_not_found")
            # A job that ended by itself while somebody cancelled it is not forgotten for it.
            gate.set()
            third = await post(jobs)
            await until(jobs, third, "completed")
            kept = await jobs.cancel(third)
            assert kept is not None and kept.state == "completed"

    go(main())


def test_who_cancels_the_request_of_a_job_cancels_the_job(tmp_path: Path) -> None:
    async def main() -> None:
        cancelled = Work("completions", said("the", reason="cancelled"))
        async with running(tmp_path, lambda _: cancelled) as (jobs, host):
            await until(jobs, await post(jobs), "cancelled")
            assert len(host.begun) == 1

    go(main())


def test_the_same_key_and_order_is_the_same_job(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as (jobs, host):
            many = await asyncio.gather(*(jobs.create(order('{"a": 1}'), "t", "k") for _ in range(5)))
            assert len({job.id for job, _ in many}) == 1
            assert sum(is_new for _, is_new in many) == 1
            job = await until(jobs, many[0][0], "completed")
            again, is_new = await jobs.create(order('{"a": 1}'), "t", "k")
            assert (again, is_new, len(host.begun)) == (job, False, 1)
            for other in (order('{"a": 2}'), order('{"a": 1}', ttl_s=9.0), order('{"a": 1}', "chat")):
                with pytest.raises(ApiError, match=r"another key, or the same body") as error:
                    await jobs.create(other, "t", "k")
                assert (error.value.status, error.value.code) == (422, "idempotency_key_reused")
            assert (await jobs.create(order('{"a": 2}'), "u", "k"))[1], "keys are a tenant's own"
            assert (await jobs.create(order('{"a": 1}'), "t", None))[1], "without a key every job is new"

    go(main())


def test_the_number_of_jobs_is_bounded_and_shared_out(tmp_path: Path) -> None:
    async def main() -> None:
        gate = asyncio.Event()
        keys = ("k" * 20, "l" * 20)
        async with running(tmp_path, lambda _: answer("x", gate), max_jobs=4, api_keys=keys) as (jobs, _):
            held = [await post(jobs, "a") for _ in range(2)]
            with pytest.raises(ApiError, match=r"at most 2 jobs of yours and 4 in all") as error:
                await post(jobs, "a")
            assert (error.value.status, error.value.code) == (429, "too_many_jobs")
            assert error.value.retry_after_s
            await post(jobs, "b")
            await jobs.cancel(held[1])
            await jobs.cancel(await jobs.get(held[1].id, "a"))
            await post(jobs, "a")

    go(main())


def test_another_tenants_job_does_not_exist(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as (jobs, _):
            job = await post(jobs, "alice")
            for tenant in ("bob", None):
                with pytest.raises(ApiError, match=r"no such job") as error:
                    await jobs.get(job.id, tenant)
                assert error.value.status == 404
                assert await jobs.list(tenant, 10) == []
                with pytest.raises(ApiError, match=r"no such job"):
                    await jobs.list(tenant, 10, after=job.id)
            assert [j.id for j in await jobs.list("alice", 10)] == [job.id]

    go(main())


def test_a_result_is_kept_for_its_time_and_not_longer(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, job_ttl_s=1000.0) as (jobs, _):
            kept = await until(jobs, await post(jobs), "completed")
            assert kept.expires is not None and kept.finished is not None
            assert kept.expires - kept.finished == 1000.0
            with pytest.raises(ApiError, match=r"at most 1000") as error:
                await post(jobs, ttl_s=1000.5)
            assert (error.value.status, error.value.param) == (400, "ttl_s")
            job = await post(jobs, ttl_s=0.2, key="k")
            with pytest.raises(ApiError, match=r"no such job"):
                async with asyncio.timeout(WAIT_S):
                    while True:
                        await jobs.get(job.id, None)
                        await asyncio.sleep(0.02)
            again, is_new = await jobs.create(order(), None, "k")
            assert is_new and again.id != job.id, "its key is free, although nothing has swept the folder yet"
            assert job.id not in [j.id for j in await jobs.list(None, 10)]

    go(main())


def test_counting_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with running(tmp_path) as (jobs, _):
            await until(jobs, await post(jobs), "completed")
            counted = await jobs.counts()
            assert counted == {"queued": 0, "running": 0, "completed": 1, "failed": 0, "cancelled": 0}
            for broken in (gone, slow):
                monkeypatch.setattr(JobStore, "counts", broken)
                assert await asyncio.wait_for(jobs.counts(), 1.5) == counted

    def slow(_: JobStore) -> Any:
        time.sleep(2.0)

    def gone(_: JobStore) -> Any:
        raise StoreError("the disk is gone")

    go(main())


def test_a_disk_that_refuses_a_new_job_is_a_clear_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise StoreError("the jobs cannot be written: the disk is full")

    async def main() -> None:
        async with running(tmp_path) as (jobs, host):
            monkeypatch.setattr(JobStore, "add", full)
            with pytest.raises(ApiError, match=r"the disk is full") as error:
                await post(jobs)
            assert (error.value.status, error.value.code) == (503, "jobs_unavailable")
            assert host.begun == [] and str(tmp_path) not in error.value.message

    go(main())


def test_a_job_is_taken_whole_though_its_client_leaves_in_between(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as (jobs, _):
            posting = asyncio.create_task(jobs.create(order(), None, "k"))
            while not jobs._tasks:
                await asyncio.sleep(0)
            posting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await posting
            async with asyncio.timeout(WAIT_S):
                while not (kept := await jobs.list(None, 1)):
                    await asyncio.sleep(0.005)
            await until(jobs, kept[0], "completed")

    go(main())


def test_nothing_runs_before_the_service_has_settled_but_results_can_be_read(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as (jobs, _):
            done = await until(jobs, await post(jobs), "completed")
        host = Host(tmp_path, lambda _: answer())
        host.settled.clear()
        jobs = Jobs(host)  # type: ignore[arg-type]
        await jobs.start()
        assert json.loads(await jobs.result(await jobs.get(done.id, None)))["object"] == "text_completion"
        job = await post(jobs)
        await asyncio.sleep(0.05)
        assert host.begun == []
        host.settled.set()
        await until(jobs, job, "completed")
        await jobs.stop()

    go(main())


def test_a_reader_that_lags_behind_the_stop_is_told_and_nothing_breaks(tmp_path: Path) -> None:
    async def main() -> None:
        never = asyncio.Event()
        async with running(tmp_path, lambda _: Work("completions", [*said("the key")[:3], never])) as (jobs, _):
            reader = jobs.follow(await until(jobs, await post(jobs), "running"))
            await anext(reader)
            await jobs.stop()
            with pytest.raises(ApiError, match="starting or stopping") as error:
                [piece async for piece in reader]
            assert (error.value.status, error.value.code) == (503, "jobs_unavailable")

    go(main())


def test_without_a_folder_there_are_no_jobs_and_a_bad_one_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(None) as (jobs, _):
            for call in (post(jobs), jobs.get("job_x", None), jobs.list(None, 1)):
                with pytest.raises(ApiError, match=r"keeps no jobs.*--jobs-dir") as error:
                    await call
                assert (error.value.status, error.value.code) == (503, "jobs_unavailable")
        async with running(tmp_path):
            second = Jobs(Host(tmp_path, lambda _: answer()))  # type: ignore[arg-type]
            with pytest.raises(LongctxError, match=r"another server uses the jobs folder"):
                await second.start()
            await second.stop()

    go(main())
