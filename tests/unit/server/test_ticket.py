"""Tickets: events in order, progress that a slow reader does not need, and what a dead engine leaves."""

from __future__ import annotations

import asyncio

import numpy as np

from longctx.events import FinishEvent, ProgressEvent, TokenEvent
from longctx.params import SamplingParams
from longctx.server.errors import ApiError
from longctx.server.messages import Submit
from longctx.server.ticket import Restarted, Ticket, cancelled_event

SUBMIT = Submit("r", np.arange(5, dtype=np.int32), SamplingParams())


def progress(processed: int) -> ProgressEvent:
    return ProgressEvent("r", "prefill", 5, 0, processed, 1.0, None)


def token(index: int) -> TokenEvent:
    return TokenEvent("r", 7, "x", index)


def end() -> FinishEvent:
    return cancelled_event(SUBMIT)


def drain(events: list, *, delivered: bool = False) -> tuple[list, list[str], Exception | None]:
    """What a reader of `events` sees, which requests were given up, and the error at the end."""

    async def read() -> tuple[list, list[str], Exception | None]:
        given_up: list[str] = []
        ticket = Ticket(SUBMIT, given_up.append)
        ticket.delivered = delivered
        for event in events:
            ticket.put(event)
        seen: list = []
        try:
            async for event in ticket:
                seen.append(event)
        except ApiError as error:
            return seen, given_up, error
        assert [e async for e in ticket] == [], "it goes on after its end"
        return seen, given_up, None

    return asyncio.run(asyncio.wait_for(read(), 10))


def test_events_come_in_order_and_end_with_the_last() -> None:
    events = [progress(2), token(0), token(1), end()]
    assert drain([*events, token(2)]) == (events, [], None)


def test_of_progress_that_waits_only_the_latest_is_kept() -> None:
    events = [progress(1), progress(2), progress(3), token(0), progress(4), progress(5), end()]
    assert drain(events)[0] == [progress(3), token(0), progress(5), end()]


def test_unread_events_are_forgotten_when_the_engine_dies() -> None:
    events = [progress(2), token(0), Restarted("r"), progress(1), token(0), end()]
    assert drain(events)[0] == [Restarted("r"), progress(1), token(0), end()]


def test_what_was_delivered_before_the_news_came_is_not_generated_again() -> None:
    seen, given_up, error = drain([Restarted("r"), token(0), end()], delivered=True)
    assert seen == [] and given_up == ["r"]
    assert isinstance(error, ApiError) and (error.status, error.code) == (500, "engine_error")


def test_an_error_ends_it_before_what_was_not_read() -> None:
    failure = ApiError.from_code("engine_error", "gone")
    seen, _, error = drain([token(0), failure])
    assert seen == [] and error is failure


def test_a_reader_waits_for_what_comes_later() -> None:
    async def run() -> list:
        ticket = Ticket(SUBMIT, lambda _: None)
        reader = asyncio.create_task(_collect(ticket))
        for event in (token(0), token(1), end()):
            await asyncio.sleep(0)
            ticket.put(event)
        return await asyncio.wait_for(reader, 10)

    assert asyncio.run(run()) == [token(0), token(1), end()]


async def _collect(ticket: Ticket) -> list:
    return [event async for event in ticket]


def test_a_cancelled_event_counts_the_prompt() -> None:
    event = cancelled_event(SUBMIT)
    assert event.reason == "cancelled" and event.usage.prompt_tokens == 5 and event.usage.cached_tokens == 0
