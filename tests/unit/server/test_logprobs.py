"""Logprobs in both of OpenAI's styles: which tokens are shown, when, with which bytes, and where their text begins."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from longctx.events import PromptLogprobs, TokenLogprobs
from longctx.server.json_pieces import dumps, json_pieces
from longctx.server.logprobs import TokenSpeller
from longctx.server.reply_completions import CompletionsRenderer
from tests.helpers.fake_running import FakeRunning, chunks_of, generated, said, whole_of
from tests.helpers.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, unigram_tokenizer

TOKENIZERS = {
    "byte_level": byte_level_tokenizer(),
    "byte_fallback": byte_fallback_tokenizer(strip_first=False),
    "byte_fallback_stripped": byte_fallback_tokenizer(strip_first=True),
    "unigram": unigram_tokenizer(),
}
TEXTS = ["the key is 4711", "naïve 👍🏽 東京", "the x", " the"]


def some(ids: list[int], tops: int = 0) -> list[TokenLogprobs]:
    """A different logprob for each token, and alternatives that are the ids before it."""
    values = [-0.5 - i / 8 for i in range(len(ids))]
    return [TokenLogprobs(value, tuple(range(3, 3 + tops)), tuple(-1.0 - k for k in range(tops))) for value in values]


def ids_of(text: str, tokenizer: Any = None) -> list[int]:
    return list((tokenizer or byte_level_tokenizer()).encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_spelled_tokens_joined_are_the_text(name: str, text: str) -> None:
    """waybarrios/vllm-mlx#109: the bytes of a token must be right where its text is half a character."""
    tokenizer = TOKENIZERS[name]
    speller, offsets, raw = TokenSpeller(tokenizer), [], b""
    ids = ids_of(text, tokenizer)
    decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for token_id in ids:
        entry = speller.take(token_id, TokenLogprobs(-1.0))
        raw += entry.token.raw
        offsets.append(entry.offset)
    if name != "unigram":  # it writes what it does not know as <unk>
        assert raw.decode() == decoded
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] < len(decoded)


def test_a_chats_entries() -> None:
    ids = ids_of("é🦜!")
    running = FakeRunning("chat", generated(ids, logprobs=some(ids, tops=2)), logprobs=2)
    whole = ChatCompletion.model_validate_json(dumps(whole_of(running)), strict=True)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == "é🦜!"
    assert [entry.logprob for entry in logprobs.content] == [value.logprob for value in some(ids)]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * len(ids)
    assert len({entry.token for entry in logprobs.content}) == len(ids), "half characters read differently"


@pytest.mark.parametrize("text", ["é🦜!", "the key is 4711 and the door is open"])
def test_a_stream_has_the_same_entries(text: str) -> None:
    ids = ids_of(text)
    events = generated(ids, logprobs=some(ids))
    chunks = chunks_of(FakeRunning("chat", events, logprobs=0))
    whole = whole_of(FakeRunning("chat", events, logprobs=0))["choices"][0]["logprobs"]["content"]
    streamed = []
    for chunk in chunks:
        parsed = ChatCompletionChunk.model_validate_json(dumps(chunk), strict=True)
        for choice in parsed.choices:
            entries = choice.logprobs.content if choice.logprobs is not None else None
            streamed += [entry.logprob for entry in entries or []]
    assert streamed == [entry["logprob"] for entry in whole] == [value.logprob for value in some(ids)]
    lists = [
        c["logprobs"] for chunk in chunks_of(FakeRunning("completions", events, logprobs=0)) for c in chunk["choices"]
    ]
    joined = {key: [x for part in lists if part for x in part[key]] for key in lists[0]}
    assert joined == whole_of(FakeRunning("completions", events, logprobs=0))["choices"][0]["logprobs"]


def test_a_completions_lists() -> None:
    ids = ids_of("é key")
    events = generated(ids, logprobs=some(ids, tops=3))
    whole = Completion.model_validate_json(dumps(whole_of(FakeRunning("completions", events, logprobs=3))), strict=True)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.top_logprobs is not None
    assert logprobs.tokens[:2] == ["bytes:\\xc3", "bytes:\\xa9"] and logprobs.text_offset is not None
    assert logprobs.text_offset[:3] == [0, 0, 1]
    for token, value, tops in zip(logprobs.tokens, logprobs.token_logprobs or [], logprobs.top_logprobs, strict=True):
        assert tops[token] == value, "the token itself is always among them"
        assert len(tops) == 4


def test_tokens_of_the_end_are_left_out() -> None:
    """The end token, or what a stop string took away, is no part of the answer; all of it was generated."""
    end = byte_level_tokenizer().eos_token_id
    ids = [*ids_of("ab"), end]
    whole = whole_of(FakeRunning("completions", generated(ids, reason="stop", logprobs=some(ids)), logprobs=0))
    assert whole["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert whole["usage"]["completion_tokens"] == 3
    ids = ids_of("abxyz")
    for endpoint in ("completions", "chat"):
        chunks = chunks_of(FakeRunning(endpoint, generated(ids, stop=["xy"], logprobs=some(ids)), logprobs=0))
        lists = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
        tokens = [
            t if isinstance(t, str) else t["token"] for part in lists for t in part.get("tokens", part.get("content"))
        ]
        assert tokens == ["a", "b"]


def test_a_token_waits_for_its_text() -> None:
    """The second y may begin the stop string when the first one is certain; when it does, it was never shown."""
    ids = byte_level_tokenizer().convert_tokens_to_ids(["key", "y", "z"])
    events = generated(ids, stop=["yz"], logprobs=some(ids))
    lists = [c["logprobs"] for k in chunks_of(FakeRunning("completions", events, logprobs=0)) for c in k["choices"]]
    assert [part["tokens"] for part in lists] == [["key"], [], []]


def test_a_last_token_without_text_is_shown_if_it_did_not_end_the_answer() -> None:
    tokenizer = byte_level_tokenizer()
    ids = [*ids_of("a"), *tokenizer.convert_tokens_to_ids(["<|start|>"])]
    whole = whole_of(FakeRunning("completions", generated(ids, reason="length", logprobs=some(ids)), logprobs=0))
    assert whole["choices"][0]["text"] == "a"
    assert whole["choices"][0]["logprobs"]["tokens"] == ["a", "<|start|>"]


def test_half_a_character_at_the_end_is_shown() -> None:
    ids = ids_of("a🦜")[:-1]
    whole = whole_of(FakeRunning("chat", generated(ids, logprobs=some(ids)), logprobs=0))
    choice = whole["choices"][0]
    assert choice["message"]["content"] == "a\ufffd"
    assert len(choice["logprobs"]["content"]) == len(ids)


def test_a_response_has_them_too() -> None:
    ids = ids_of("é key")
    running = FakeRunning("responses", generated(ids, reason="stop", logprobs=some(ids, tops=1)), logprobs=1)
    response = Response.model_validate_json(dumps(whole_of(running)), strict=True)
    [item] = response.output
    entries = item.content[0].logprobs  # type: ignore[union-attr]
    assert bytes(b for entry in entries or [] for b in entry.bytes).decode() == "é key"


def test_impossible_tokens_have_a_number_in_json() -> None:
    ids = ids_of("a")
    events = generated(ids, logprobs=[TokenLogprobs(float("-inf"), (5,), (float("-inf"),))])
    whole = whole_of(FakeRunning("chat", events, logprobs=1))
    entry = whole["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == -9999.0 == entry["top_logprobs"][0]["logprob"]
    dumps(whole)


# -- of prompts ------------------------------------------------------------------------------------------------------


def prompt_of(num: int, tops: int = 2) -> PromptLogprobs:
    rows = np.arange(num - 1, dtype=np.float32)
    ids = np.tile(np.arange(5, 5 + tops, dtype=np.int32), (num - 1, 1))
    return PromptLogprobs(-rows - 1, ids, np.tile(-np.arange(tops, dtype=np.float32), (num - 1, 1)))


@pytest.mark.parametrize("text", ["the key 🦜", "é"])
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "byte_fallback_stripped"])
def test_an_echoed_prompts_lists(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    prompt, ids = ids_of(text, tokenizer), ids_of("the x", tokenizer)
    events = generated(ids, tokenizer=tokenizer, logprobs=some(ids, 2), prompt_logprobs=prompt_of(len(prompt)))
    running = FakeRunning("completions", events, prompts=[prompt], tokenizer=tokenizer, echo=(text,), logprobs=2)
    whole = whole_of(running)
    logprobs = whole["choices"][0]["logprobs"]
    assert {len(logprobs[key]) for key in logprobs} == {len(prompt) + len(ids)}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(prompt)] == [-1.0 - i for i in range(len(prompt) - 1)]
    assert logprobs["text_offset"][len(prompt)] == len(text)
    assert whole["choices"][0]["text"] == text + "the x"
    for token, value, tops in list(
        zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )[1:]:
        assert tops[token] >= value and len(tops) >= 2
    assert b"".join(json_pieces(whole)).decode()


def test_an_added_bos_is_no_text() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.bos_token = "<|start|>"
    try:
        prompt = [tokenizer.bos_token_id, *ids_of("ab<|end|>c")]
        for echo, offsets in (("ab<|end|>c", [0, 0, 1, 2, 9]), ("<|start|>ab<|end|>c", [0, 9, 10, 11, 18])):
            events = said("x", prompt_logprobs=prompt_of(5), logprobs=some([1]))
            running = FakeRunning("completions", events, prompts=[prompt], echo=(echo,), logprobs=0)
            logprobs = whole_of(running)["choices"][0]["logprobs"]
            assert logprobs["tokens"][0] == "<|start|>"
            assert logprobs["text_offset"] == [*offsets, len(echo)]
    finally:
        tokenizer.bos_token = None


def test_offsets_stay_inside_the_echo() -> None:
    """A normalizer may write more than it read."""
    running = FakeRunning(
        "completions",
        said("x", prompt_logprobs=prompt_of(4), logprobs=some([1])),
        prompts=[ids_of("abcd")],
        echo=("ab",),
        logprobs=0,
    )
    assert whole_of(running)["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 2, 2]


def test_prompt_logprobs_without_echo_are_by_id() -> None:
    prompt = ids_of("abc")
    for endpoint in ("completions", "chat"):
        running = FakeRunning(endpoint, said("x", prompt_logprobs=prompt_of(3)), prompts=[prompt], prompt_logprobs=2)
        whole = whole_of(running)
        rows = whole["prompt_logprobs"] if endpoint == "chat" else whole["choices"][0]["prompt_logprobs"]
        assert rows[0] is None and len(rows) == 3
        assert rows[1][str(prompt[1])] == {"logprob": -1.0, "rank": None, "decoded_token": "b"}
        assert rows[1]["5"]["rank"] == 1
        assert b'"rank":null' in b"".join(json_pieces(whole))


def test_many_logprobs_are_not_the_event_loops_work(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    whole = CompletionsRenderer.whole

    def watched(self: CompletionsRenderer) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return whole(self)

    monkeypatch.setattr(CompletionsRenderer, "whole", watched)
    for num, logprobs in ((10, 0), (600, None), (600, 0)):
        ids = [ids_of("a")[0]] * num
        whole_of(FakeRunning("completions", generated(ids, logprobs=some(ids)), logprobs=logprobs))
    whole_of(
        FakeRunning("completions", said("x", prompt_logprobs=prompt_of(3)), prompts=[[5, 6, 7]], prompt_logprobs=2)
    )
    assert threads == [True, True, False, False]


def test_a_huge_prompt_is_written_slice_by_slice() -> None:
    num = 20_000
    running = FakeRunning(
        "completions", said("x", prompt_logprobs=prompt_of(num)), prompts=[[5] * num], prompt_logprobs=2
    )
    sizes = [len(piece) for piece in json_pieces(whole_of(running))]
    assert max(sizes) < 100_000 < sum(sizes)
