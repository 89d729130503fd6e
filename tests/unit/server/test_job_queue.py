"""Which jobs run when: turns, waiting, failing engines, stops, kills, a disk that fails."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longctx.server import job_queue
from longctx.server.errors import ApiError
from longctx.server.job_store import JobStore, StoreError
from tests.helpers.fake_running import said
from tests.helpers.jobs import (
    DIED,
    Work,
    answer,
    chunks_of,
    eventually,
    go,
    like,
    post,
    running,
    stream,
    until,
)
from tests.helpers.jobs import short_pauses as short_pauses


def test_a_job_waits_while_the_engine_is_full_or_away(tmp_path: Path) -> None:
    codes = ["queue_full", "engine_restarting", "draining", "queue_full"]

    def script(n: int) -> Any:
        return ApiError.from_code(codes[n], "not now", 60.0) if n < len(codes) else answer()

    async def main() -> None:
        async with running(tmp_path, script) as (jobs, host):
            done = await until(jobs, await post(jobs), "completed", "failed")
            assert (done.state, done.attempts) == ("completed", 1), "waiting is no try"
            assert len({begin["request_id"] for begin in host.begun}) == 5

    go(main())


def test_a_job_that_is_long_to_prepare_waits_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every try reads its prompt again, which takes a core from those who work."""
    tries: list[tuple[float, float]] = []

    async def main() -> None:
        async with running(tmp_path) as (jobs, _):

            async def begin(*_: Any, **__: Any) -> Any:
                began_s = time.monotonic()
                await asyncio.sleep(0.05)
                tries.append((began_s, time.monotonic()))
                if len(tries) < 3:
                    raise ApiError.from_code("queue_full", "not now", 1.0)
                return answer()

            monkeypatch.setattr(jobs._queue, "_begin", begin)
            await until(jobs, await post(jobs), "completed")

    go(main())
    for (began_s, ended_s), (next_s, _) in itertools.pairwise(tries):
        assert next_s - ended_s >= 4 * (ended_s - began_s) - 0.01


def test_a_job_that_no_engine_survives_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, lambda n: DIED if n == 2 else Work("completions", [DIED])) as (jobs, host):
            failed = await until(jobs, await post(jobs), "failed", "completed")
            assert (failed.attempts, len(host.begun)) == (job_queue.MAX_ATTEMPTS, job_queue.MAX_ATTEMPTS)
            with pytest.raises(ApiError, match=r"given up after 5 runs.*the engine died") as error:
                await jobs.result(failed)
            assert (error.value.status, error.value.code) == (500, "job_given_up")

    go(main())


def test_a_job_that_may_kill_engines_has_no_other_beside_it(tmp_path: Path) -> None:
    """Two runs end with the engine; the third waits until it is alone, and then nothing else begins."""

    async def main() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        gates, deaths = {b"innocent": first, b"suspect": second}, 0

        def script(n: int) -> Any:
            nonlocal deaths
            body = host.begun[n]["body"]
            if body == b"suspect" and deaths < job_queue.ATTEMPTS_TOGETHER:
                deaths += 1
                return Work("completions", [DIED])
            return answer("x", *filter(None, [gates.get(body)]))

        async with running(tmp_path, script, max_running_jobs=3) as (jobs, host):
            innocent = await until(jobs, await post(jobs, body="innocent"), "running")
            suspect = await post(jobs, body="suspect")
            await eventually(lambda: deaths == 2)
            await asyncio.sleep(0.05)
            assert len(host.begun) == 3
            first.set()
            await until(jobs, innocent, "completed")
            await until(jobs, suspect, "running")
            late = await post(jobs, body="late")
            await asyncio.sleep(0.05)
            assert len(host.begun) == 4
            second.set()
            assert (await until(jobs, suspect, "completed")).attempts == 3
            await until(jobs, late, "completed")

    go(main())


@pytest.mark.parametrize(
    ("error", "when"),
    [
        (ApiError(400, "too long", code="context_length_exceeded", param="prompt"), "begin"),
        (ApiError(404, "no such model", code="model_not_found"), "begin"),
        (ApiError.from_code("deadline_exceeded", "too late"), "begin"),
        (ApiError.from_code("deadline_exceeded", "too late"), "run"),
    ],
)
def test_what_can_only_fail_again_fails_at_once(tmp_path: Path, error: ApiError, when: str) -> None:
    script = (lambda _: error) if when == "begin" else lambda _: Work("completions", [*said("the key")[:2], error])

    async def main() -> None:
        async with running(tmp_path, script) as (jobs, host):
            failed = await until(jobs, await post(jobs), "failed")
            assert len(host.begun) == 1
            with pytest.raises(ApiError) as caught:
                await jobs.result(failed)
            shown = caught.value
            assert (shown.status, shown.body()) == (error.status, error.body())
            assert (await stream(jobs, failed))[-1] == error.code

    go(main())


def test_tenants_take_turns_and_a_tenants_jobs_their_order(tmp_path: Path) -> None:
    async def main() -> None:
        gate = asyncio.Event()
        keys = ("k" * 20, "l" * 20)
        script = lambda n: answer("x", gate)  # noqa: E731
        async with running(tmp_path, script, max_running_jobs=1, api_keys=keys) as (jobs, host):
            names = ["a0", "a1", "a2", "b0", "b1"]
            posted = [await post(jobs, name[0], body=name) for name in names]
            await until(jobs, posted[0], "running")
            assert [jobs.place(job) for job in posted] == [None, 0, 1, 0, 1]
            gate.set()
            for job in posted:
                await until(jobs, job, "completed")
            assert [begin["body"].decode() for begin in host.begun] == ["a0", "b0", "a1", "b1", "a2"]

    go(main())


def test_no_more_run_at_a_time_than_may(tmp_path: Path) -> None:
    async def main() -> None:
        gate = asyncio.Event()
        async with running(tmp_path, lambda _: answer("x", gate), max_running_jobs=2) as (jobs, host):
            posted = [await post(jobs) for _ in range(4)]
            for job in posted[:2]:
                await until(jobs, job, "running")
            await asyncio.sleep(0.05)
            assert len(host.begun) == 2
            gate.set()
            for job in posted:
                await until(jobs, job, "completed")

    go(main())


def test_an_orderly_stop_keeps_what_runs_for_the_next_start(tmp_path: Path) -> None:
    async def main() -> None:
        never = asyncio.Event()
        async with running(tmp_path, lambda _: Work("completions", [*said("the key")[:3], never])) as (jobs, host):
            job = await post(jobs, body='{"seed": 7}')
            reading = asyncio.create_task(stream(jobs, await until(jobs, job, "running")))
            await asyncio.sleep(0.1)
            await jobs.suspend()
            assert host.works[0].cancelled
            assert (await reading)[-1] == "draining", "its readers are told"
            waiting = await jobs.get(job.id, None)
            assert (waiting.state, waiting.attempts) == ("queued", 0), "a stop is not held against it"
            with pytest.raises(ApiError) as error:
                await post(jobs)
            assert error.value.code == "draining"
        with pytest.raises(ApiError, match=r"starting or stopping"):
            await jobs.get(job.id, None)
        async with running(tmp_path) as (jobs, host):
            done = await until(jobs, job, "completed")
            assert (done.attempts, host.begun[0]["body"]) == (1, b'{"seed": 7}')
            assert await stream(jobs, done) == like(await chunks_of(answer()), job)

    go(main())


def test_a_killed_servers_jobs_run_again_but_not_for_ever(tmp_path: Path) -> None:
    """What a kill leaves is what lies in the folder at any moment: a copy of it."""

    async def main() -> None:
        never = asyncio.Event()
        folder, job = tmp_path / "0", None
        for attempt in range(1, job_queue.MAX_ATTEMPTS + 1):
            script = lambda _: Work("completions", [*said("the key is")[:4], never])  # noqa: E731
            async with running(folder, script) as (jobs, _):
                job = await post(jobs) if job is None else job
                now = await until(jobs, job, "running")
                assert now.attempts == attempt
                await anext(jobs.follow(now))
                folder = tmp_path / str(attempt)
                shutil.copytree(tmp_path / str(attempt - 1), folder)
            if attempt == 2:
                shutil.copytree(folder, tmp_path / "second")
        assert job is not None
        async with running(folder) as (jobs, host):
            failed = await until(jobs, job, "failed")
            assert host.begun == []
            assert failed.error is not None and failed.error["message"].startswith("given up after 5 runs")
        async with running(tmp_path / "second") as (jobs, _):
            done = await until(jobs, job, "completed")
            assert done.attempts == 3
            assert await stream(jobs, done) == like(await chunks_of(answer()), job), (
                "nothing of the broken runs is left"
            )

    go(main())


def test_a_disk_that_fails_for_a_while_delays_a_job_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = {"start": 2, "append": 3, "finish": 2}
    real = {name: getattr(JobStore, name) for name in failures}

    def failing(name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            if failures[name]:
                failures[name] -= 1
                raise StoreError("the jobs cannot be written: the disk is full")
            return real[name](*args, **kwargs)

        return method

    async def main() -> None:
        async with running(tmp_path) as (jobs, _):
            for name in failures:
                monkeypatch.setattr(JobStore, name, failing(name))
            job = await post(jobs)
            done = await until(jobs, job, "completed")
            assert failures == {"start": 0, "append": 0, "finish": 0}
            assert done.attempts == 1, "trying to write is no try of the job"
            assert await stream(jobs, done) == like(await chunks_of(answer()), job)

    go(main())
