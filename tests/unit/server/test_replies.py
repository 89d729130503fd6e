"""Replies of every endpoint against hand-made events: their objects are those of OpenAI's own client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from longctx.server.errors import ApiError
from longctx.server.json_pieces import dumps
from longctx.server.reply import Reply
from longctx.server.ticket import Restarted
from tests.helpers.fake_running import FakeRunning, chunks_of, generated, progressed, said, whole_of
from tests.helpers.tokenizers import byte_level_tokenizer

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ENDPOINTS = ("completions", "chat", "responses")
WHOLE: dict[str, Any] = {"completions": Completion, "chat": ChatCompletion, "responses": Response}
CALL = '<tool_call>{"name": "look_up", "arguments": {"key": 4711}}</tool_call>'


def checked(endpoint: str, chunk: dict[str, Any]) -> Any:
    """A chunk through the client's own type, strictly, and back from the JSON that is sent."""
    text = dumps(chunk)
    if endpoint == "completions":
        # The client's type has no word for "not finished yet", which OpenAI's own streams say.
        choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
        return Completion.model_validate_json(dumps({**chunk, "choices": choices}), strict=True)
    if endpoint == "chat":
        return ChatCompletionChunk.model_validate_json(text, strict=True)
    return EVENT.validate_json(text, strict=True)


def shown(endpoint: str, chunks: list[dict[str, Any]], choice: int = 0) -> str:
    """The text that a reader of the stream has seen."""
    if endpoint == "responses":
        return "".join(c["delta"] for c in chunks if c["type"] == "response.output_text.delta")
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
    return "".join(c["text"] if endpoint == "completions" else c["delta"].get("content") or "" for c in choices)


def text_of(endpoint: str, whole: dict[str, Any], choice: int = 0) -> str:
    if endpoint == "responses":
        return Response.model_validate(whole).output_text
    found = whole["choices"][choice]
    return found["text"] if endpoint == "completions" else found["message"]["content"]


# -- every endpoint --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_whole_is_the_clients_own_type(endpoint: str) -> None:
    whole = whole_of(FakeRunning(endpoint, said("the key is 4711", reason="stop", cached=2), warnings=("w",)))
    parsed = WHOLE[endpoint].model_validate_json(dumps(whole), strict=True)
    assert text_of(endpoint, whole) == "the key is 4711"
    assert parsed.model == "tiny" and FakeRunning.id in parsed.id
    details = whole["usage"]["input_tokens_details" if endpoint == "responses" else "prompt_tokens_details"]
    assert details["cached_tokens"] == 2
    assert details["by_tier"] == {"g1": 2, "g2": 0, "g3": 0, "g4": 0}
    assert set(whole["timings"]) == {"queue_ms", "ttft_ms", "prefill_tokens_per_s", "decode_tokens_per_s"}
    assert whole["warnings"] == ["w"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("include_usage", [False, True])
def test_stream_is_the_clients_own_types(endpoint: str, include_usage: bool) -> None:
    items = [progressed(1), progressed(3), *said("the key is 4711 and the door is open")]
    running = FakeRunning(endpoint, items, include_usage=include_usage, return_progress=True)
    chunks = chunks_of(running)
    for chunk in chunks:
        checked(endpoint, chunk)
    assert shown(endpoint, chunks) == "the key is 4711 and the door is open"
    assert running.finished


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_stream_and_whole_say_the_same(endpoint: str) -> None:
    text = "naïve 👩‍👩‍👧‍👦 東京 नमस्ते"
    chunks = chunks_of(FakeRunning(endpoint, said(text)))
    assert shown(endpoint, chunks) == text == text_of(endpoint, whole_of(FakeRunning(endpoint, said(text))))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_chunk_without_text_before_the_first_token(endpoint: str) -> None:
    """ROCm/vllm#204: empty deltas were streamed while a prompt was read; so they are for half a character."""
    running = FakeRunning(endpoint, [progressed(1), *said("👍🏽x")])
    chunks = chunks_of(running)
    if endpoint == "responses":
        assert [c["type"] for c in chunks[:2]] == ["response.created", "response.in_progress"]
        assert all(c["delta"] for c in chunks if c["type"] == "response.output_text.delta")
    else:
        texts = [c.get("text", c.get("delta", {}).get("content")) for chunk in chunks for c in chunk["choices"]]
        assert all(texts[:-1]) and len(texts) == 4  # two characters of several tokens, one more, the end


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_delivered_is_said_before_the_chunk_leaves(endpoint: str) -> None:
    running = FakeRunning(endpoint, said("👍a"))
    chunks_of(running)
    log = [entry if isinstance(entry, tuple) else "chunk" for entry in running.log]
    first = running.log.index(("deliver", 0))
    shown_before = [e for e in running.log[:first] if not isinstance(e, tuple)]
    assert shown(endpoint, shown_before) == ""
    assert log.count(("deliver", 0)) == 2, "a token that shows nothing may be generated again"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_collecting_delivers_nothing(endpoint: str) -> None:
    running = FakeRunning(endpoint, said("ab"))
    whole_of(running)
    assert running.log == []


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_restart_before_anything_was_sent(endpoint: str) -> None:
    # Held back: half a character, or what may become a call.
    held = said("👍")[:2] if endpoint == "completions" else said("<tool")[:-1]
    again = [*held, (0, Restarted("r")), progressed(1), *said("👍 ok")]
    options: dict[str, Any] = {} if endpoint == "completions" else {"tools": ("look_up",)}
    assert shown(endpoint, chunks_of(FakeRunning(endpoint, again, **options))) == "👍 ok"
    collected = FakeRunning(endpoint, [*said("thrown away")[:-1], (0, Restarted("r")), *said("kept")])
    assert text_of(endpoint, whole_of(collected)) == "kept"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_restart_after_something_was_sent_is_an_error(endpoint: str) -> None:
    chunks = chunks_of(FakeRunning(endpoint, [*said("ab")[:1], (0, Restarted("r")), *said("cd")]))
    failure = chunks[-1]
    assert "died" in str(failure)
    assert "c" not in shown(endpoint, chunks[:-1])


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_an_end_without_an_answer_is_an_error(endpoint: str, reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        whole_of(FakeRunning(endpoint, said("ab", reason=reason)))
    assert caught.value.status == {"cancelled": 499, "error": 500}[reason]
    failure = chunks_of(FakeRunning(endpoint, said("ab", reason=reason)))[-1]
    if endpoint == "responses":
        event = checked(endpoint, failure)
        assert event.type == "response.failed" and event.response.status == "failed"
    else:
        assert set(failure) == {"error"} and failure["error"]["code"] in ("cancelled", "engine_error")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_stopping_to_read_cancels(endpoint: str) -> None:
    async def read_some() -> FakeRunning:
        running = FakeRunning(endpoint, said("abcdef"))
        stream = Reply(running).chunks()
        async for chunk in stream:
            if shown(endpoint, [chunk]):
                break
        await stream.aclose()
        return running

    assert asyncio.run(read_some()).cancelled


# -- choices, usage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_choices_keep_apart(endpoint: str) -> None:
    a, b = said("first", choice=0, cached=0), said("second one", choice=1, cached=2)
    mixed = [*b[:3], *a, *b[3:]]
    whole = whole_of(FakeRunning(endpoint, mixed, n=2))
    assert [text_of(endpoint, whole, i) for i in (0, 1)] == ["first", "second one"]
    assert [c["seed"] for c in whole["choices"]] == [100, 101]
    usage = whole["usage"]
    assert usage["prompt_tokens"] == 3, "one prompt, however many answers"
    assert usage["completion_tokens"] == len(a) + len(b) - 2
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "the other choice found what this request computed"
    chunks = chunks_of(FakeRunning(endpoint, mixed, n=2))
    assert [shown(endpoint, chunks, i) for i in (0, 1)] == ["first", "second one"]


def test_several_prompts_are_all_counted() -> None:
    items = [e for i in range(4) for e in said("x", choice=i, prompt_tokens=3 + i // 2, cached=i // 2)]
    usage = whole_of(FakeRunning("completions", items, prompts=[[5, 6, 7], [5, 6, 7, 8]], n=2))["usage"]
    assert usage["prompt_tokens"] == 7 and usage["prompt_tokens_details"]["cached_tokens"] == 1


def test_a_late_first_choice_keeps_its_place() -> None:
    """The client's own accumulator puts choices into a list as they appear."""
    a, b = said("first", choice=0, reason="stop"), said("second", choice=1, reason="stop")
    state = ChatCompletionStreamState()
    for chunk in chunks_of(FakeRunning("chat", [*b, *a], n=2)):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    final = state.get_final_completion()
    assert [(c.index, c.message.content, c.message.role) for c in final.choices] == [
        (0, "first", "assistant"),
        (1, "second", "assistant"),
    ]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_include_usage_is_one_last_chunk_without_choices(endpoint: str) -> None:
    chunks = chunks_of(FakeRunning(endpoint, said("ab"), include_usage=True))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    plain = chunks_of(FakeRunning(endpoint, said("ab")))
    assert plain[-1]["choices"][0]["finish_reason"] == "length"
    assert plain[-1]["usage"] == chunks[-1]["usage"], "what the cache gave is always said"
    assert not any("usage" in chunk for chunk in plain[:-1])


def test_progress_has_llama_cpps_shape() -> None:
    chunks = chunks_of(FakeRunning("chat", [progressed(2), *said("a")], return_progress=True))
    first, second = chunks[:2]
    assert first["prompt_progress"]["stage"] == "queued" and first["prompt_progress"]["total"] == 3
    assert first["choices"] == [] == second["choices"]
    assert {"total": 3, "cache": 0, "processed": 2, "time_ms": 10.0}.items() <= second["prompt_progress"].items()
    assert {"eta_ms", "stage", "queue_position"} <= set(second["prompt_progress"])
    silent = chunks_of(FakeRunning("chat", [progressed(2), *said("a")]))
    assert not any("prompt_progress" in chunk for chunk in silent)


def test_an_empty_answer() -> None:
    end = byte_level_tokenizer().eos_token_id
    items = generated([end], reason="stop")
    chunks = chunks_of(FakeRunning("chat", items))
    assert [c["choices"][0]["delta"] for c in chunks] == [{"role": "assistant", "content": ""}]
    response = whole_of(FakeRunning("responses", items))
    assert [item["content"][0]["text"] for item in response["output"]] == [""]
    assert whole_of(FakeRunning("completions", items))["choices"][0]["text"] == ""


def test_echo_comes_first() -> None:
    options: dict[str, Any] = {"echo": ("one ", "two "), "prompts": [[5], [6]]}
    items = [*said("a", choice=1), *said("b", choice=0)]
    assert [c["text"] for c in whole_of(FakeRunning("completions", items, **options))["choices"]] == ["one b", "two a"]
    chunks = chunks_of(FakeRunning("completions", items, **options))
    assert [shown("completions", chunks, i) for i in (0, 1)] == ["one b", "two a"]


# -- tool calls ------------------------------------------------------------------------------------------------------


def test_a_chats_tool_calls() -> None:
    items = said(f"See. {CALL}\n{CALL}", reason="stop")
    whole = ChatCompletion.model_validate_json(
        dumps(whole_of(FakeRunning("chat", items, tools=("look_up",)))), strict=True
    )
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "See."
    assert [c.function.arguments for c in choice.message.tool_calls or []] == ['{"key": 4711}'] * 2  # type: ignore[union-attr]
    state = ChatCompletionStreamState()
    for chunk in chunks_of(FakeRunning("chat", items, tools=("look_up",))):
        state.handle_chunk(checked("chat", chunk))
    streamed = state.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls" and streamed.message.content == "See."
    assert [c.function.name for c in streamed.message.tool_calls or []] == ["look_up"] * 2
    assert len({c.id for c in streamed.message.tool_calls or []}) == 2


def test_without_tools_their_syntax_is_text() -> None:
    whole = whole_of(FakeRunning("chat", said(CALL, reason="stop")))
    assert whole["choices"][0]["message"]["content"] == CALL
    assert whole["choices"][0]["finish_reason"] == "stop"


def test_a_call_cut_by_the_length_is_no_finished_call() -> None:
    whole = whole_of(FakeRunning("chat", said(CALL + "<tool_call>{", reason="length"), tools=("look_up",)))
    assert whole["choices"][0]["finish_reason"] == "length"
