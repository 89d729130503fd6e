"""A job's stream and result: as its endpoint would answer, from any place, across runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from longctx.server.job_store import Chunk
from longctx.server.job_stream import Position
from longctx.server.reply import Reply
from tests.helpers.fake_running import progressed, said
from tests.helpers.jobs import (
    DIED,
    WAIT_S,
    Work,
    answer,
    chunks_of,
    go,
    like,
    of_choice,
    post,
    read,
    running,
    stream,
    until,
)
from tests.helpers.jobs import short_pauses as short_pauses


@pytest.mark.parametrize("endpoint", ["completions", "chat", "responses"])
def test_a_job_answers_as_its_endpoint_would(tmp_path: Path, endpoint: str) -> None:
    async def main() -> None:
        async with running(tmp_path, lambda _: answer(endpoint=endpoint)) as (jobs, host):
            job = await post(jobs, body='{"a": 1}', endpoint=endpoint)
            done = await until(jobs, job, "completed")
            expected = like([await Reply(answer(endpoint=endpoint)).collect()], job)[0]
            result = json.loads(await jobs.result(done))
            for response in (expected, result):
                response.pop("completed_at", None)
            assert result == expected
            assert (done.attempts, done.usage) == (1, expected["usage"])
            given = {"endpoint": endpoint, "body": b'{"a": 1}', "tenant": None, "alias": job.id, "is_job": True}
            assert {name: value for name, value in host.begun[0].items() if name != "request_id"} == given
            streamed, direct = await stream(jobs, done), await chunks_of(answer(endpoint=endpoint))
            if endpoint == "responses":  # whose last event has the time of its end
                for last in (streamed[-1], direct[-1]):
                    last["response"].pop("completed_at", None)
            assert streamed == like(direct, job)

    go(main())


def test_a_reader_gets_every_chunk_once_when_the_engine_dies(tmp_path: Path) -> None:
    """Two choices in another order the second time; one reader from the start, one that comes back with its place."""
    long, short = "the door is open and the key is in it", "the lazy dog"

    def events(n: int) -> list[Any]:
        first, second = said(long), said(short, choice=1)
        return [*first, *second] if n % 2 else [*second, *first]

    gate = asyncio.Event()

    def script(n: int) -> Any:
        items = [*events(0)[:9], gate, DIED] if n == 0 else events(n)
        return Work("completions", items, n=2, include_usage=True)

    async def main() -> None:
        async with running(tmp_path, script) as (jobs, host):
            job = await post(jobs)
            first = jobs.follow(await until(jobs, job, "running"))
            begun = [await anext(first) for _ in range(4)]
            gate.set()
            rest = [piece async for piece in first]
            done = await until(jobs, job, "completed")
            assert (done.attempts, len(host.begun)) == (2, 2)
            expected = like(await chunks_of(Work("completions", events(1), n=2, include_usage=True)), job)
            for choice, text in ((0, long), (1, short), (-1, "")):
                one = of_choice([read(piece.data) for piece in begun + rest], choice)
                assert one == of_choice(expected, choice)
                assert "".join(chunk["choices"][0]["text"] for chunk in one if chunk["choices"]) == text
            late = [read(piece.data) async for piece in jobs.follow(done, begun[-1].place)]
            for choice in (0, 1, -1):
                assert of_choice(late, choice) == of_choice([read(piece.data) for piece in rest], choice)
            assert await stream(jobs, done) == expected

    go(main())


def test_a_position_counts_each_choice_by_itself() -> None:
    chunks = [Chunk(choice, b"") for choice in (0, 0, 1, 0, 1, -1)]
    first = Position()
    assert [first.take(chunk) for chunk in chunks[:3]] == [True] * 3
    resumed = Position(str(first))
    other_order = [Chunk(choice, b"") for choice in (1, 1, 0, 0, 0, -1)]
    assert [resumed.take(chunk) for chunk in other_order] == [False, True, False, False, True, True]
    first.begin_again()
    assert [first.take(chunk) for chunk in chunks] == [False, False, False, True, True, True]
    assert [Position("nonsense:x,,7").take(chunk) for chunk in chunks[:1]] == [True]


def test_progress_is_the_requests_own_and_reaches_readers_without_being_kept(tmp_path: Path) -> None:
    async def main() -> None:
        gate = asyncio.Event()
        items = [progressed(1), gate, progressed(3), *said("x")]
        script = lambda _: Work("completions", items, return_progress=True)  # noqa: E731
        async with running(tmp_path, script) as (jobs, host):
            job = await until(jobs, await post(jobs), "running")
            record = host.registry.open(host.begun[0]["request_id"], "completions", None, job.id)
            shown = jobs.progress(job)
            assert shown is not None and {**shown, "time_ms": 0} == {**record.to_json(), "time_ms": 0}
            reader = jobs.follow(job)
            async with asyncio.timeout(WAIT_S):
                piece = await anext(reader)
                while read(piece.data)["prompt_progress"]["processed"] != 1:
                    piece = await anext(reader)
            assert piece.place is None
            gate.set()
            rest = [read(piece.data) async for piece in reader]
            assert "".join(c["choices"][0]["text"] for c in rest if c["choices"]) == "x"
            done = await until(jobs, job, "completed")
            assert jobs.progress(done) is None
            assert all("prompt_progress" not in chunk for chunk in await stream(jobs, done))

    go(main())
