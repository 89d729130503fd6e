"""`Service.begin` and what it leaves behind: records, cancels, deadlines, refusals with a time to come back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from longctx.server.errors import ApiError
from longctx.server.messages import EngineStats, Loading
from longctx.server.service import Service, retry_after
from longctx.server.ticket import Restarted
from tests.helpers.server_fakes import FakeClient, FakePreparer, finish, make_service, progress, token


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 30))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def begin(service: Service, body: bytes = b"{}", **options: Any) -> Any:
    given = {"tenant": None, "request_id": "r1", **options}
    return await service.begin("chat", body, **given)


async def read(running: Any) -> list[tuple[int, Any]]:
    return [item async for item in running.events()]


def test_events_of_all_choices_come_merged_and_end() -> None:
    async def main() -> None:
        service, client, _ = make_service(preparer=FakePreparer(works=2, per_prompt=2))
        running = await begin(service)
        assert running.seeds == [100, 101] and list(client.tickets) == ["r1-0", "r1-1"]
        a, b = client.tickets.values()
        reader = asyncio.create_task(read(running))
        for ticket, event in (
            (b, token("r1-1", 0)),
            (a, token("r1-0", 0)),
            (b, finish("r1-1")),
            (a, finish("r1-0", "stop")),
        ):
            ticket.put(event)
            await settle()
        seen = [(choice, type(event).__name__) for choice, event in await reader]
        assert seen == [(1, "TokenEvent"), (0, "TokenEvent"), (1, "FinishEvent"), (0, "FinishEvent")]
        record = running.record
        assert record.finished and record.outcome == "finished" and record.finish_reason == "stop"
        assert record.usage()["prompt_tokens"] == 10 and record.usage()["completion_tokens"] == 4
        assert not service.running and not service.registry.num_live and client.cancelled == []
        assert "secret" not in str(record.to_json())

    run(main)


def test_a_reader_that_stops_early_cancels_every_choice() -> None:
    async def main() -> None:
        service, client, _ = make_service(preparer=FakePreparer(works=2))
        running = await begin(service)
        client.tickets["r1-0"].put(token("r1-0", 0))
        events = running.events()
        await anext(events)
        await events.aclose()
        assert client.cancelled == ["r1-0", "r1-1"]
        assert service.registry.num_live == 1, "the engine has not let go of it yet"
        for id, ticket in client.tickets.items():
            ticket.put(finish(id, "cancelled"))
        await settle()
        assert running.record.outcome == "cancelled" and not service.registry.num_live

    run(main)


def test_records_are_current_without_a_reader() -> None:
    async def main() -> None:
        service, client, _ = make_service()
        running = await begin(service)
        ticket, record = client.tickets["r1-0"], running.record
        assert record.stage == "queued" and record.total == 10
        ticket.put(progress("r1-0", "queued", queue_position=3))
        await settle()
        assert record.queue_position == 3
        ticket.put(progress("r1-0", processed=4, eta_ms=900.0, cached=2))
        await settle()
        assert (record.stage, record.processed, record.cached, record.eta_ms) == ("prefill", 4, 2, 900.0)
        ticket.put(token("r1-0", 0))
        await settle()
        assert (record.stage, record.processed, record.generated, record.eta_ms) == ("decode", 10, 1, None)
        ticket.put(finish("r1-0"))
        await settle()
        assert record.stage == "finished" and service.registry.get("r1", None) is record

    run(main)


def test_progress_that_waits_is_replaced_and_nothing_else_is() -> None:
    async def main() -> None:
        service, client, _ = make_service()
        running = await begin(service)
        ticket = client.tickets["r1-0"]
        for event in (*(progress("r1-0", processed=i) for i in range(5)), token("r1-0", 0), token("r1-0", 1)):
            ticket.put(event)
            await settle()
        ticket.put(finish("r1-0"))
        names = [type(event).__name__ for _, event in await read(running)]
        assert names == ["ProgressEvent", "TokenEvent", "TokenEvent", "FinishEvent"]

    run(main)


def test_after_a_restart_tokens_that_nobody_read_are_forgotten() -> None:
    """Read later, they would look like tokens of the second run."""

    async def main() -> None:
        service, client, _ = make_service(preparer=FakePreparer(works=2))
        running = await begin(service)
        a, b = client.tickets.values()
        for ticket, id in ((a, "r1-0"), (b, "r1-1")):
            ticket.put(token(id, 0))
        await settle()
        a.put(Restarted("r1-0"))
        await settle()
        assert running.record.choices[0].generated == 0 and running.record.choices[1].generated == 1
        a.put(token("r1-0", 0))
        for ticket, id in ((a, "r1-0"), (b, "r1-1")):
            ticket.put(finish(id))
        kinds = [(choice, type(event).__name__) for choice, event in await read(running)]
        assert [k for c, k in kinds if c == 0] == ["Restarted", "TokenEvent", "FinishEvent"]
        assert [k for c, k in kinds if c == 1] == ["TokenEvent", "FinishEvent"]

    run(main)


def test_a_delivered_token_is_told_to_its_ticket_only() -> None:
    async def main() -> None:
        service, client, _ = make_service(preparer=FakePreparer(works=2))
        running = await begin(service)
        running.deliver(1)
        assert [t.delivered for t in client.tickets.values()] == [False, True]
        running.cancel()

    run(main)


@pytest.mark.parametrize("how", ["engine error", "finish error"])
def test_a_choice_that_fails_ends_the_others(how: str) -> None:
    async def main() -> None:
        service, client, _ = make_service(preparer=FakePreparer(works=2))
        running = await begin(service)
        client.tickets["r1-0"].put(
            ApiError.from_code("engine_error", "it broke") if how == "engine error" else finish("r1-0", "error")
        )
        with pytest.raises(ApiError, match="it broke") as caught:
            await read(running)
        assert caught.value.status == 500 and "r1-1" in client.cancelled
        assert running.record.outcome == "error" and running.record.error == "it broke"
        client.tickets["r1-1"].put(finish("r1-1", "cancelled"))
        await settle()
        assert not service.running

    run(main)


def test_a_deadline_cancels_and_raises() -> None:
    async def main() -> None:
        service, client, _ = make_service(preparer=FakePreparer(options={"timeout_s": 0.05}))
        running = await begin(service)
        with pytest.raises(ApiError) as caught:
            await read(running)
        assert caught.value.status == 504 and client.cancelled == ["r1-0"]
        assert running.record.outcome == "error"

    run(main)


def test_a_deadline_needs_no_reader() -> None:
    async def main() -> None:
        service, client, _ = make_service(preparer=FakePreparer(options={"timeout_s": 0.02}))
        await begin(service)
        await asyncio.sleep(0.2)
        assert client.cancelled == ["r1-0"]

    run(main)


def test_the_servers_own_limit_holds_for_requests_and_not_for_jobs() -> None:
    async def main() -> None:
        service, client, _ = make_service(request_timeout_s=0.05)
        running = await begin(service)
        with pytest.raises(ApiError) as caught:
            await read(running)
        assert caught.value.code == "deadline_exceeded"
        job = await begin(service, request_id="r2", is_job=True)
        reader = asyncio.create_task(read(job))
        await asyncio.sleep(0.15)
        client.tickets["r2-0"].put(finish("r2-0"))
        assert len(await reader) == 1

    run(main)


def test_a_deadline_covers_reading_the_body_and_waiting_for_the_engine() -> None:
    async def main() -> None:
        service, client, _ = make_service(preparer=FakePreparer(gate=asyncio.Event()), request_timeout_s=0.05)
        with pytest.raises(ApiError) as caught:
            await begin(service)
        assert caught.value.status == 504 and not client.tickets and not service.registry.num_live
        service, client, _ = make_service(FakeClient(delay_s=60), request_timeout_s=0.05)
        with pytest.raises(ApiError) as caught:
            await begin(service)
        assert caught.value.status == 504 and client.cancelled == ["r1-0"]

    run(main)


def test_a_request_can_be_cancelled_while_its_prompt_is_read() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        service, client, _ = make_service(preparer=FakePreparer(gate=gate))
        beginning = asyncio.create_task(begin(service))
        await settle()
        record = service.registry.get("r1", None)
        assert record is not None and record.stage == "tokenizing"
        service.cancel(record)
        gate.set()
        running = await beginning
        assert client.cancelled == ["r1-0"]
        client.tickets["r1-0"].put(finish("r1-0", "cancelled", tokens=0))
        assert [e.reason for _, e in await read(running)] == ["cancelled"]

    run(main)


def test_a_request_can_be_cancelled_while_it_waits_for_an_engine() -> None:
    async def main() -> None:
        service, client, _ = make_service(FakeClient(delay_s=60), FakePreparer(works=2))
        beginning = asyncio.create_task(begin(service))
        await settle()
        service.cancel(service.registry.get("r1", None))
        assert client.cancelled == ["r1-0", "r1-1"]
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)

    run(main)


def test_a_caller_that_leaves_while_its_prompt_is_read_leaves_nothing() -> None:
    async def main() -> None:
        service, client, preparer = make_service(preparer=FakePreparer(gate=asyncio.Event()))
        beginning = asyncio.create_task(begin(service))
        await settle()
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        assert not service.registry.num_live and not client.tickets
        preparer.gate, client.delay_s = None, 60
        beginning = asyncio.create_task(begin(service, request_id="r2"))
        await settle()
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        assert client.cancelled == ["r2-0"] and not service.registry.num_live
        await asyncio.wait_for(service.wait_idle(), 1)

    run(main)


def test_when_one_choice_is_refused_the_others_are_cancelled() -> None:
    async def main() -> None:
        full = ApiError.from_code("queue_full", "full")
        service, client, _ = make_service(FakeClient(refuse={2: full}), FakePreparer(works=4, per_prompt=4))
        with pytest.raises(ApiError) as caught:
            await begin(service)
        assert caught.value.status == 429 and caught.value.retry_after_s == 1
        assert set(client.cancelled) == {f"r1-{i}" for i in range(4)}
        assert not service.registry.num_live and service.registry.get("r1", None).outcome == "refused"

    run(main)


def test_the_time_to_come_back_is_that_of_the_first_to_end() -> None:
    async def main() -> None:
        service, client, _ = make_service(preparer=FakePreparer(max_tokens=None))
        for number, eta_ms in enumerate((90_000.0, 12_300.0)):
            await begin(service, request_id=f"r{number}")
            client.tickets[f"r{number}-0"].put(progress(f"r{number}-0", eta_ms=eta_ms))
        await settle()
        client.refuse = {2: ApiError.from_code("queue_full", "full")}
        with pytest.raises(ApiError) as caught:
            await begin(service, request_id="r9")
        assert caught.value.retry_after_s == 13

    run(main)


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"state": "starting"}, 503, "model_loading"),
        ({"state": "failed", "last_failure": "no memory"}, 503, "engine_unavailable"),
        ({"state": "stopping"}, 503, "engine_unavailable"),
    ],
)
def test_a_server_that_cannot_take_requests_says_why(change: dict[str, Any], status: int, code: str) -> None:
    async def main() -> None:
        service, _, _ = make_service(FakeClient(**change))
        with pytest.raises(ApiError) as caught:
            await begin(service)
        assert (caught.value.status, caught.value.code) == (status, code)
        assert not service.ready and not service.registry.num_live

    run(main)


def test_draining_refuses_new_requests_and_waits_for_the_old_ones() -> None:
    async def main() -> None:
        service, client, _ = make_service()
        await begin(service)
        service.drain(20)
        with pytest.raises(ApiError) as caught:
            await begin(service, request_id="r2")
        assert caught.value.code == "draining" and 1 <= caught.value.retry_after_s <= 20
        waiting = asyncio.create_task(service.wait_idle())
        await settle()
        assert not waiting.done()
        client.tickets["r1-0"].put(finish("r1-0"))
        await asyncio.wait_for(waiting, 5)

    run(main)


def test_a_restarting_engine_still_takes_requests() -> None:
    """The client itself waits for the engine; what it then refuses gets a time from the first start."""

    async def main() -> None:
        gone = ApiError.from_code("engine_restarting", "again")
        service, _, _ = make_service(FakeClient(state="restarting", refuse={0: gone}))
        with pytest.raises(ApiError) as caught:
            await begin(service)
        assert caught.value.status == 503 and caught.value.retry_after_s == 3

    run(main)


def test_loading_progress_becomes_a_time() -> None:
    async def main() -> None:
        service, *_ = make_service(FakeClient(state="starting", loading=Loading("reading", 25.0, 100.0)))
        service.started_s -= 10
        with pytest.raises(ApiError) as caught:
            service.check_open()
        assert 30 <= caught.value.retry_after_s <= 31

    run(main)


def test_a_start_that_fails_is_told_and_stops_all_the_same() -> None:
    async def main() -> None:
        service, client, _ = make_service()

        async def fail() -> None:
            raise ValueError("no model")

        client.start = fail  # type: ignore[method-assign]
        await service.start()
        assert service.settled.is_set() and str(service.failure) == "no model"
        await asyncio.gather(service.stop(), service.stop())
        assert client.stopped == 1

    run(main)


def test_salts_keep_tenants_apart() -> None:
    async def main() -> None:
        service, client, preparer = make_service()
        for number, (tenant, salt) in enumerate([(None, None), ("a", None), ("b", None), ("a", "x"), (None, "x")]):
            preparer.options = {"cache_salt": salt}
            await begin(service, tenant=tenant, request_id=f"r{number}")
        salts = [ticket.submit.cache_salt for ticket in client.tickets.values()]
        assert salts[0] is None and len(set(salts)) == 5

    run(main)


def test_retry_after_is_whole_positive_and_bounded() -> None:
    assert [retry_after(s) for s in (-5, 0, 0.2, 1.2, 1e9)] == [1, 1, 1, 2, 600]


@pytest.mark.parametrize("wanted", [True, False])
def test_prompts_are_logged_only_where_the_operator_asked_for_them(
    wanted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        service, client, _ = make_service(log_prompts=wanted)
        running = await begin(service, b'{"prompt": "my diary"}')
        for ticket in client.tickets.values():
            ticket.put(finish(ticket.id))
        await read(running)

    with caplog.at_level(logging.DEBUG):
        run(main)
    told = caplog.text + str([getattr(record, "fields", {}) for record in caplog.records])
    assert ("my diary" in told) == wanted
    assert "a request ended" in told


def test_every_snapshot_of_the_engine_reaches_the_metrics() -> None:
    async def main() -> None:
        service, client, _ = make_service()
        for engine, steps in ((1, 5), (2, 3)):
            client.on_stats(EngineStats(0, 0, {}, {"steps": steps}, engine))
        assert service.metrics.registry.get_sample_value("longctx_steps_total") == 8

    run(main)
