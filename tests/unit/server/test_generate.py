"""The generating routes over a service of fakes: statuses, early heads, clients that leave at every stage."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI

from longctx.events import FinishEvent, PromptLogprobs
from longctx.server import generate
from longctx.server.errors import ApiError
from longctx.server.generate import LARGE_BODY_BYTES, PATHS, router, warning_header
from longctx.server.reply_completions import CompletionsRenderer
from longctx.server.service import Service
from tests.helpers.server_fakes import FakeClient, FakePreparer, finish, make_service, progress, token
from tests.helpers.tokenizers import byte_level_tokenizer

LARGE = b'{"prompt": "' + b"x" * LARGE_BODY_BYTES + b'", "stream": true, "return_progress": true}'


class Call:
    """One request to the routes alone, as the guard passes it on."""

    def __init__(self, service: Service, path: str, body: bytes = b"{}", id: str = "r1"):
        self.gone = asyncio.Event()
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ended = False
        app = FastAPI()
        app.include_router(router(service))

        @app.exception_handler(ApiError)
        async def refuse(_: Any, error: ApiError) -> Any:
            return generate.Response(json.dumps(error.body()), error.status)

        state = {"request_id": id, "client_request_id": None, "tenant": None, "body": bytearray(body)}
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "state": state}
        self.task = asyncio.create_task(app({**scope, "app": app}, self._receive, self._send))  # type: ignore[arg-type]

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
            self.ended = not message.get("more_body", False)

    @property
    def events(self) -> list[Any]:
        lines = self.body.decode().split("\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]


def run(test: Callable[..., Coroutine[Any, Any, None]], **parts: Any) -> None:
    """`test(service, client, preparer)` on a loop of its own; nothing it began may be left over."""

    async def main() -> None:
        preparer = FakePreparer(**{k: v for k, v in parts.items() if k in FakePreparer.__dataclass_fields__})
        client = FakeClient(**{k: v for k, v in parts.items() if k in FakeClient.__dataclass_fields__})
        service, *_ = make_service(client, preparer)
        async with asyncio.timeout(20):
            await test(service, client, preparer)

    asyncio.run(main())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def feed(client: FakeClient, *, id: str = "r1-0", tokens: int = 2, reason: str = "length") -> None:
    ticket = client.tickets[id]
    for index in range(tokens):
        ticket.put(token(id, index))
    end = finish(id, reason, tokens=tokens)
    text = "".join(f"t{index}" for index in range(tokens))
    ticket.put(FinishEvent(**{**vars(end), "text": text}))


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer(endpoint: str, stream: bool) -> None:
    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        call = Call(service, PATHS[endpoint])
        await until(lambda: client.tickets)
        feed(client)
        await call.task
        assert call.status == 200 and call.ended
        assert call.headers["x-longctx-warnings"] == "beware of ?; and"
        if stream:
            assert call.headers["content-type"].startswith("text/event-stream")
            assert call.body.endswith(b"data: [DONE]\n\n") == (endpoint != "responses")
        else:
            whole = json.loads(call.body)
            assert whole["warnings"] == ["beware of é", "and"] and whole["usage"]["total_tokens"] == 12
        assert client.tickets["r1-0"].delivered == stream
        await until(lambda: not service.running)
        assert not client.cancelled

    run(test, options={"stream": stream, "warnings": ("beware of é", "and")})


@pytest.mark.parametrize("body", [b"bad", b"bad" + b" " * 10])
def test_a_refusal_has_its_status_even_for_a_stream(body: bytes) -> None:
    """vllm-project/vllm#33418: a 200 and then a broken stream."""

    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        call = Call(service, "/v1/completions", b"bad")
        await call.task
        assert call.status == 400 and "error" in json.loads(call.body)

    run(test, options={"stream": True})


@pytest.mark.parametrize("endpoint", PATHS)
def test_a_large_streams_head_does_not_wait_for_its_body(endpoint: str) -> None:
    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        preparer.gate = asyncio.Event()
        call = Call(service, PATHS[endpoint], LARGE)
        await until(lambda: call.status)
        assert call.status == 200 and not client.tickets
        if endpoint != "responses":
            await until(lambda: call.events)
            assert call.events[0]["prompt_progress"]["stage"] == "tokenizing"
        preparer.gate.set()
        await until(lambda: client.tickets)
        client.tickets["r1-0"].put(progress("r1-0", processed=4))
        feed(client)
        await call.task
        ids = {e["id"] for e in call.events if "id" in e} | {
            e["response"]["id"] for e in call.events if "response" in e
        }
        assert len(ids) == 1 and call.ended

    run(test, options={"stream": True, "return_progress": True})


@pytest.mark.parametrize("endpoint", PATHS)
def test_a_late_refusal_is_an_event(endpoint: str) -> None:
    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        preparer.gate = asyncio.Event()

        async def refuse(endpoint: str, body: Any) -> Any:
            await asyncio.sleep(0.2)
            raise ApiError(400, "too long", code="context_length_exceeded")

        preparer.prepare = refuse  # type: ignore[method-assign]
        call = Call(service, PATHS[endpoint], LARGE.replace(b"return_progress", b"return_progresS"))
        await call.task
        assert call.status == 200
        [event] = call.events
        assert event["error"]["code"] == "context_length_exceeded"
        assert call.body.endswith(b"[DONE]\n\n") == (endpoint != "responses")

    run(test)


def test_a_large_refusal_that_comes_soon_has_its_status() -> None:
    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        async def refuse(endpoint: str, body: Any) -> Any:
            raise ApiError(400, "no")

        preparer.prepare = refuse  # type: ignore[method-assign]
        call = Call(service, "/v1/completions", LARGE)
        await call.task
        assert call.status == 400

    run(test)


MIDDLING = b'{"stream": true, "prompt": "' + b"x" * 100_000 + b'"}'


def test_a_middling_streams_head_waits_for_its_fields_and_not_for_its_text() -> None:
    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        preparer.gate, preparer.check_s = asyncio.Event(), 0.4
        began_s = time.perf_counter()
        call = Call(service, "/v1/completions", MIDDLING)
        await asyncio.sleep(0.3)
        assert call.status is None
        await until(lambda: call.status == 200)
        assert time.perf_counter() - began_s < 2.0
        assert call.headers["x-longctx-warnings"] == "beware"
        call.gone.set()
        await call.task

    run(test, options={"stream": True, "warnings": ("beware",)})


@pytest.mark.parametrize("endpoint", PATHS)
def test_what_is_wrong_with_middling_streams(endpoint: str) -> None:
    """A field: a status, however long the check takes. The text: a status if it is found soon, else an event."""

    def refusal(delay_s: float, status: int, message: str) -> Any:
        async def refuse(endpoint: str, body: Any) -> Any:
            await asyncio.sleep(delay_s)
            raise ApiError(status, message)

        return refuse

    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        for delay_s, status in ((0.0, 400), (0.3, 200)):
            preparer.prepare = refusal(delay_s, 400, "the text")  # type: ignore[method-assign]
            call = Call(service, PATHS[endpoint], MIDDLING, id=f"r{status}")
            await call.task
            assert call.status == status and b"the text" in call.body
        preparer.check = refusal(0.3, 422, "a field")  # type: ignore[method-assign]
        call = Call(service, PATHS[endpoint], MIDDLING)
        await call.task
        assert call.status == 422 and not service.registry.num_live

    run(test, options={"stream": True})


def test_a_small_streams_head_waits_for_the_engines_verdict_unless_there_is_no_engine() -> None:
    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        client.delay_s, client.refuse = 0.3, {0: ApiError(429, "full"), 1: ApiError(429, "full")}
        body = b'{"stream": true}'
        call = Call(service, "/v1/completions", body)
        await call.task
        assert call.status == 429
        client.state = "restarting"
        call = Call(service, "/v1/completions", body, id="r2")
        await call.task
        assert call.status == 200 and call.events[0]["error"]["message"] == "full"

    run(test, options={"stream": True})


def test_a_prompt_that_speaks_of_streams_is_none() -> None:
    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        prompt = json.dumps({"prompt": '"stream": true' + "x" * LARGE_BODY_BYTES + '"stream": true'}).encode()
        preparer.gate = asyncio.Event()
        call = Call(service, "/v1/completions", prompt)
        await asyncio.sleep(0.3)
        assert call.status is None
        preparer.gate.set()
        await until(lambda: client.tickets)
        feed(client)
        await call.task
        assert json.loads(call.body)["object"] == "text_completion"

    run(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["reading", "queued", "prefill", "decode"])
def test_a_client_that_leaves_ends_its_work(stream: bool, moment: str) -> None:
    """antirez/ds4#333, lemonade-sdk/lemonade#3133: the only slot was held for a client that had left."""

    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        preparer.gate = asyncio.Event()
        call = Call(service, "/v1/chat/completions")
        if moment != "reading":
            preparer.gate.set()
            await until(lambda: client.tickets)
            if moment == "prefill":
                client.tickets["r1-0"].put(progress("r1-0", processed=4))
            if moment == "decode":
                client.tickets["r1-0"].put(token("r1-0", 0))
            await asyncio.sleep(0.02)
        else:
            await asyncio.sleep(0.02)
        call.gone.set()
        await call.task
        assert client.cancelled == ([] if moment == "reading" else ["r1-0"])
        if client.tickets:
            client.tickets["r1-0"].put(finish("r1-0", "cancelled"))
        await asyncio.wait_for(service.wait_idle(), 5)

    run(test, options={"stream": stream, "return_progress": stream})


def test_a_large_streams_client_that_leaves_while_its_body_is_read() -> None:
    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        preparer.gate = asyncio.Event()
        call = Call(service, "/v1/completions", LARGE)
        await until(lambda: call.status)
        call.gone.set()
        await call.task
        await asyncio.wait_for(service.wait_idle(), 5)
        assert not client.tickets

    run(test, options={"stream": True})


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_someone_cancels(stream: bool) -> None:
    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        call = Call(service, "/v1/completions")
        await until(lambda: client.tickets)
        client.tickets["r1-0"].put(finish("r1-0", "cancelled"))
        await call.task
        if stream:
            assert call.events[-1]["error"]["code"] == "cancelled" and call.body.endswith(b"[DONE]\n\n")
        else:
            assert call.status == 499 and json.loads(call.body)["error"]["code"] == "cancelled"

    run(test, options={"stream": stream})


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_stopping_server_ends_may_be_sent_again(stream: bool) -> None:
    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        call = Call(service, "/v1/completions")
        await until(lambda: client.tickets)
        service.drain(0.0)
        client.tickets["r1-0"].put(finish("r1-0", "cancelled"))
        await call.task
        if stream:
            assert call.events[-1]["error"]["code"] == "draining"
        else:
            assert call.status == 503 and json.loads(call.body)["error"]["code"] == "draining"

    run(test, options={"stream": stream})


def test_a_fault_of_ours_ends_a_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompletionsRenderer, "piece", lambda *_: 1 / 0)

    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        call = Call(service, "/v1/completions")
        await until(lambda: client.tickets)
        feed(client)
        await call.task
        error = call.events[-1]["error"]
        assert error["type"] == "server_error" and "Traceback" not in call.body.decode()
        assert call.body.endswith(b"[DONE]\n\n")

    run(test, options={"stream": True})


def test_a_huge_answer_is_sent_in_slices() -> None:
    async def test(service: Service, client: FakeClient, preparer: FakePreparer) -> None:
        num = 30_000
        rows = PromptLogprobs(np.zeros(num - 1), np.zeros((num - 1, 2), dtype=np.int32), np.zeros((num - 1, 2)))
        prepare = preparer.prepare

        async def long(endpoint: str, body: Any) -> Any:
            prepared = await prepare(endpoint, body)
            object.__setattr__(prepared.works[0], "token_ids", np.full(num, 5, dtype=np.int32))
            return prepared

        preparer.prepare = long  # type: ignore[method-assign]
        call = Call(service, "/v1/completions")
        await until(lambda: client.tickets)
        client.tickets["r1-0"].put(FinishEvent(**{**vars(finish("r1-0")), "prompt_logprobs": rows}))
        await call.task
        assert len(json.loads(call.body)["choices"][0]["prompt_logprobs"]) == num
        assert "content-length" not in call.headers

    run(test, options={"prompt_logprobs": 2}, tokenizer=byte_level_tokenizer())


def test_warnings_fit_into_a_header() -> None:
    assert warning_header(("a\u2028", "b")) == "a?; b"
    assert len(warning_header(("x" * 5000,))) == 1000
    assert warning_header(("a\nb",)) == "a?b"
