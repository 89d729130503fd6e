"""OpenAI's own client against a live server: answers, streams, logprobs, usage, errors, timeouts, cancelling."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
import torch

from tests.helpers.server import LiveServer, save_tiny, words
from tests.helpers.tiny import hf_logits, make_tiny
from tests.helpers.tokenizers import byte_level_tokenizer

pytestmark = pytest.mark.slow  # a server takes its seconds to start

POSITIONS = 8192
MODEL: dict[str, Any] = {"max_position_embeddings": POSITIONS}
CHAT: Any = [{"role": "user", "content": "where is the key?"}]
ENDLESS = {"ignore_eos": True}
TOO_LONG = "the key " * (POSITIONS * 3 // 4)
"""A small body all the same: of a larger one the text may be found too long when the stream has begun."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("openai")
    save_tiny(folder / "tiny", **MODEL)
    with LiveServer(folder / "tiny", "--ping-seconds", "0.2", cache=folder / "cache") as live:
        yield live
        assert "Traceback" not in live.stderr


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(server: LiveServer) -> Iterator[None]:
    yield
    until(lambda: running(server) == 0)
    with server.client() as http:
        assert http.get("/health").json()["restarts"] == 0


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def running(server: LiveServer) -> int:
    with server.client() as http:
        return int(http.get("/health").json()["running_requests"])


def record(server: LiveServer, id: str) -> dict[str, Any]:
    with server.client() as http:
        return dict(http.get(f"/v1/requests/{id}").json())


def salted(salt: str) -> dict[str, Any]:
    return {"cache_salt": salt}


# -- completions -----------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny").id == "tiny"


def test_a_completion_is_hugging_faces_own(client: openai.OpenAI) -> None:
    """Token by token and logprob by logprob, prompt included."""
    prompt = "the key is 4711 and the door is open"
    completion = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=12, temperature=0, logprobs=3, echo=True, extra_body=ENDLESS
    )
    [choice] = completion.choices
    tokenizer, logprobs = byte_level_tokenizer(), choice.logprobs
    assert choice.finish_reason == "length" and choice.text.startswith(prompt) and logprobs is not None
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    model, known = make_tiny("llama", **MODEL), len(tokenizer)  # rows beyond the tokenizer are no tokens
    for _ in range(12):
        ids.append(int(hf_logits(model, ids)[-1, :known].argmax()))
    expected = torch.log_softmax(hf_logits(model, ids)[:, :known], dim=-1)
    wanted = [float(expected[i, token]) for i, token in enumerate(ids[1:])]
    got = logprobs.token_logprobs or []
    assert got[0] is None and got[1:] == pytest.approx(wanted, abs=1e-4)
    assert [len(tops) for tops in (logprobs.top_logprobs or [])[1:]] == pytest.approx([3] * (len(ids) - 1), abs=1)
    assert choice.text == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert logprobs.text_offset is not None and logprobs.text_offset == sorted(logprobs.text_offset)
    usage = completion.usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (len(ids) - 12, 12)


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"logprobs": 1}, {"stop": ["e", "\x00"]}])
def test_a_streamed_completion_is_the_whole_one(client: openai.OpenAI, options: dict[str, Any]) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "prompt": "the fox",
        "max_tokens": 40,
        "seed": 7,
        "temperature": 1,
        **options,
    }
    whole = client.completions.create(**request)
    texts, tokens, reasons = [""] * len(whole.choices), [], [None] * len(whole.choices)
    for chunk in client.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]  # type: ignore[call-overload]
            tokens += (choice.logprobs.tokens or []) if choice.logprobs is not None else []
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    if "logprobs" in options:
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None and tokens == logprobs.tokens
    if "n" in options:
        assert texts[0] != texts[1], "answers of one seed have their own draws"


def test_many_prompts_in_one_request(client: openai.OpenAI) -> None:
    prompts = ["the key", "a door", "the lazy dog"]
    together = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0)
    alone = [client.completions.create(model="tiny", prompt=p, max_tokens=6, temperature=0) for p in prompts]
    assert [c.text for c in together.choices] == [one.choices[0].text for one in alone]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)


def test_token_ids_as_a_prompt(client: openai.OpenAI) -> None:
    ids = byte_level_tokenizer().encode("the key", add_special_tokens=False)
    by_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=6, temperature=0)
    by_text = client.completions.create(model="tiny", prompt="the key", max_tokens=6, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text


# -- chats -----------------------------------------------------------------------------------------------------------


def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 30, "seed": 3, "temperature": 1, "n": 2}
    whole = client.chat.completions.create(**request, logprobs=True, top_logprobs=2)
    with client.chat.completions.stream(
        **request, logprobs=True, top_logprobs=2, stream_options={"include_usage": True}
    ) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
    texts = ["".join(c.delta.content or "" for k in chunks for c in k.choices if c.index == i) for i in (0, 1)]
    assert texts == [choice.message.content for choice in whole.choices]
    for i, choice in enumerate(whole.choices):
        assert choice.logprobs is not None and choice.logprobs.content is not None
        parts = [c.logprobs.content or [] for k in chunks for c in k.choices if c.index == i and c.logprobs]
        streamed = [entry for part in parts for entry in part]
        assert [e.bytes for e in streamed] == [e.bytes for e in choice.logprobs.content]
        raw = b"".join(bytes(e.bytes or []) for e in choice.logprobs.content)
        assert raw.decode(errors="replace") == choice.message.content
        assert all(len(e.top_logprobs) == 2 for e in choice.logprobs.content)
    roles = [c.delta.role for k in chunks for c in k.choices if c.delta.role]
    assert roles == ["assistant", "assistant"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_no_chunk_without_text_before_the_first_token(client: openai.OpenAI) -> None:
    """ROCm/vllm#204, fmperf-project/fmperf#13: empty deltas while a prompt is read in chunks."""
    prompt = words(700, seed=1)
    stream = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=8, stream=True, extra_body={**salted("b07"), "return_progress": True}
    )
    first: list[Any] = []
    for chunk in stream:
        first.append(chunk)
        if chunk.choices:
            break
    stream.close()
    assert first[-1].choices[0].text, "what comes before the first text is progress"
    progress = [chunk.prompt_progress for chunk in first[:-1]]
    assert progress[0]["stage"] == "queued" and progress[-1]["processed"] == progress[-1]["total"] > 700
    done = [p["processed"] for p in progress]
    assert done == sorted(done)


def test_usage_says_what_the_cache_gave(client: openai.OpenAI) -> None:
    """vllm-project/vllm#18149: counts that are always prompt - 1, or negative. vllm-project/vllm#16016: salts."""

    def cached(salt: str, **more: Any) -> int:
        completion = client.completions.create(
            model="tiny", prompt=words(600, seed=2), max_tokens=2, extra_body=salted(salt), **more
        )
        assert completion.usage is not None and completion.usage.prompt_tokens_details is not None
        details = completion.usage.prompt_tokens_details
        assert details.by_tier["g1"] == details.cached_tokens  # type: ignore[attr-defined]
        assert 0 <= (details.cached_tokens or 0) < completion.usage.prompt_tokens
        return details.cached_tokens or 0

    assert cached("a") == 0
    assert cached("a") > 500
    assert cached("b") == 0
    assert cached("c", n=3) == 0, "answers that share a prompt do not call it cached"


def test_settings_reach_the_model(client: openai.OpenAI) -> None:
    token = byte_level_tokenizer().convert_tokens_to_ids("k")
    biased = client.completions.create(
        model="tiny", prompt="a", max_tokens=5, temperature=0, logit_bias={str(token): 100}, extra_body=ENDLESS
    )
    assert biased.choices[0].text == "kkkkk"
    stopped = client.completions.create(
        model="tiny", prompt="a", max_tokens=5, temperature=0, logit_bias={str(token): 100}, stop="kkk"
    )
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")


def test_what_has_no_effect_is_said(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="a", max_tokens=1, extra_body={"store": True, "service_tier": "flex"}
    )
    assert "store" in raw.headers["x-longctx-warnings"]
    assert any("service_tier" in warning for warning in raw.parse().warnings)  # type: ignore[attr-defined]


# -- responses -------------------------------------------------------------------------------------------------------


def test_a_response(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "input": "where is the key?",
        "instructions": "be brief",
        "max_output_tokens": 12,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = client.responses.create(**request, metadata={"a": "b"})
    assert whole.instructions == "be brief" and whole.metadata == {"a": "b"}
    assert whole.usage is not None and whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(**request) as stream:
        events = list(stream)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete" if whole.status == "incomplete" else "response.completed"
    assert last.response.output[0].content == whole.output[0].content  # type: ignore[union-attr]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    again = client.responses.create(**request)
    assert again.usage is not None and again.usage.input_tokens_details.cached_tokens > 0


# -- errors ----------------------------------------------------------------------------------------------------------


def asks(client: openai.OpenAI) -> dict[str, Callable[..., Any]]:
    ids = [5] * (POSITIONS + 1)
    return {
        "text": lambda **o: client.completions.create(model="tiny", prompt=TOO_LONG, max_tokens=1, **o),
        "ids": lambda **o: client.completions.create(model="tiny", prompt=ids, max_tokens=1, **o),
        "answer": lambda **o: client.completions.create(model="tiny", prompt="a", max_tokens=POSITIONS + 1, **o),
        "chat": lambda **o: client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": TOO_LONG}], **o
        ),
        "response": lambda **o: client.responses.create(model="tiny", input=TOO_LONG, **o),
    }


@pytest.mark.parametrize("kind", ["text", "ids", "answer", "chat", "response"])
def test_too_long_is_refused_alike_streamed_or_not(client: openai.OpenAI, kind: str) -> None:
    """vllm-project/vllm#33418, ollama/ollama#3839: 500s, broken streams, or silently cut prompts."""
    bodies = []
    for options in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError) as caught:
            asks(client)[kind](**options)
        assert caught.value.code == "context_length_exceeded"
        assert f"{POSITIONS:,}" in caught.value.message
        bodies.append(caught.value.body)
    assert bodies[0] == bodies[1]


def test_errors_have_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.completions.create(model="tiny", prompt="a", extra_body={"nonsense": 1})
    assert "nonsense" in unknown.value.message
    with pytest.raises(openai.BadRequestError) as tools:
        function: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
        client.chat.completions.create(model="tiny", messages=CHAT, tools=[function])
    assert "tool" in tools.value.message
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="a", echo=True, logprobs=1, stream=True)


def test_a_large_body_streams_its_refusal_or_its_answer(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError) as caught:
        for _ in client.completions.create(model="tiny", prompt="x y " * 1_000_000, max_tokens=1, stream=True):
            pass
    assert caught.value.code == "context_length_exceeded"
    padded = {"metadata": {f"key{i}": "v" * 500 for i in range(16)}, "user": "u" * 2_000_000}
    chunks = list(
        client.completions.create(
            model="tiny", prompt="the key", max_tokens=4, temperature=0, stream=True, extra_body=padded
        )
    )
    whole = client.completions.create(model="tiny", prompt="the key", max_tokens=4, temperature=0)
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole.choices[0].text


# -- time ------------------------------------------------------------------------------------------------------------


def test_pings_keep_a_silent_stream_alive(server: LiveServer) -> None:
    """ggml-org/llama.cpp#24013: proxies and clients gave up before the first token."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=2.0) as client:
        # Whoever waits for a place has nothing to say: its stream would time out without pings.
        running = [_endless(client) for _ in range(8)]
        waiting = client.completions.create(model="tiny", prompt="a", max_tokens=2, stream=True, extra_body=ENDLESS)
        closing = threading.Timer(5.0, lambda: [stream.close() for stream in running])
        closing.start()
        assert "".join(c.text for chunk in waiting for c in chunk.choices)
        closing.join()


def _endless(client: openai.OpenAI) -> Any:
    stream = client.completions.create(
        model="tiny", prompt="the", max_tokens=POSITIONS - 100, stream=True, extra_body=ENDLESS
    )
    next(iter(stream))
    return stream


def test_a_stream_that_is_closed_ends_its_request(server: LiveServer, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny", prompt="the", max_tokens=POSITIONS - 100, stream=True, extra_body=ENDLESS
    )
    id = next(iter(stream)).id
    assert record(server, id)["finish_reason"] is None
    stream.close()
    until(lambda: record(server, id)["finish_reason"] == "cancelled")
    assert record(server, id)["generated"] < POSITIONS - 200


def test_a_client_that_times_out_ends_its_request(server: LiveServer, client: openai.OpenAI) -> None:
    """antirez/ds4#333: the server computed on for nobody. Not streamed: there is nothing to write that could fail."""
    headers = {"X-Client-Request-Id": "times-out"}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1.0).completions.create(
            model="tiny", prompt="the", max_tokens=POSITIONS - 100, extra_headers=headers, extra_body=ENDLESS
        )
    until(lambda: record(server, "times-out")["finish_reason"] == "cancelled")


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.APIError) as caught:
        answer = client.completions.create(
            model="tiny",
            prompt="the",
            max_tokens=POSITIONS - 100,
            stream=stream,
            extra_body={**ENDLESS, "timeout_s": 0.5},
        )
        for _ in answer if stream else ():
            pass
    assert caught.value.code == "deadline_exceeded"
    assert stream or caught.value.status_code == 504  # type: ignore[attr-defined]


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_a_request_is_cancelled_by_its_answers_id(server: LiveServer, client: openai.OpenAI, endpoint: str) -> None:
    options: dict[str, Any] = {"model": "tiny", "stream": True, "extra_body": ENDLESS}
    if endpoint == "chat":
        stream: Any = client.chat.completions.create(messages=CHAT, max_tokens=POSITIONS - 200, **options)
    else:
        stream = client.responses.create(input="a", max_output_tokens=POSITIONS - 200, **options)
    first = next(iter(stream))
    id = first.id if endpoint == "chat" else first.response.id
    with server.client() as http:
        assert http.delete(f"/v1/requests/{id}").json()["cancelled"] is True
    if endpoint == "chat":
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "cancelled"
    else:
        last = list(stream)[-1]
        assert last.type == "response.failed" and "cancelled" in last.response.error.message


def test_many_at_once_are_each_their_own(server: LiveServer) -> None:
    prompts = [words(20 + 3 * i, seed=i) for i in range(12)]

    async def ask(client: openai.AsyncOpenAI, prompt: str, stream: bool) -> str:
        request: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0}
        if not stream:
            return (await client.completions.create(**request)).choices[0].text
        chunks = await client.completions.create(**request, stream=True)
        return "".join([c.text async for chunk in chunks for c in chunk.choices])

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(ask(client, p, i % 2 == 0) for i, p in enumerate(prompts)))
            assert together == [await ask(client, p, False) for p in prompts]

    asyncio.run(main())
