"""Bodies that cannot be served: each is refused at once, in a short line that names the field and repeats nothing."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from longctx.server.errors import ApiError
from longctx.server.settings import ServerSettings
from tests.helpers.text_side import TOOLS, make_info, make_text, prepare_body

HELLO = [{"role": "user", "content": "hello"}]
MARK = "zqxj"
"""Stands in every long input: an error that repeats its input repeats this."""


def text_body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hello", **fields}).encode()


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


def said(content: Any, role: Any = "user", **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": content, **fields}]}).encode()


def answer_to(**fields: Any) -> bytes:
    return json.dumps({"input": "hello", **fields}).encode()


# Name -> (endpoint, body, what the message must contain).
BAD: dict[str, tuple[str, bytes, str]] = {
    # Bytes that are no JSON object.
    "empty": ("chat", b"", "empty"),
    "only spaces": ("chat", b"  \n\t ", "empty"),
    "no JSON": ("chat", b"hello", "not valid JSON"),
    "cut off": ("chat", b'{"messages": [', "not valid JSON"),
    "trailing comma": ("completions", b'{"prompt": "a",}', "not valid JSON"),
    "two objects": ("completions", b'{"prompt": "a"} {"prompt": "b"}', "not valid JSON"),
    "single quotes": ("completions", b"{'prompt': 'a'}", "not valid JSON"),
    "comment": ("completions", b'{"prompt": "a" /* b */}', "not valid JSON"),
    "byte order mark": ("completions", b'\xef\xbb\xbf{"prompt": "a"}', "not valid JSON"),
    "UTF-16": ("completions", '{"prompt": "a"}'.encode("utf-16"), "not valid JSON"),
    "no UTF-8": ("completions", b'{"prompt": "\xff\xfe"}', "not valid JSON"),
    "overlong UTF-8": ("completions", b'{"prompt": "\xc0\xaf"}', "not valid JSON"),
    "raw surrogate": ("completions", b'{"prompt": "\xed\xa0\x80"}', "not valid JSON"),
    "lone leading surrogate": ("completions", b'{"prompt": "\\ud800"}', "not valid JSON"),
    "lone trailing surrogate": ("completions", b'{"prompt": "a\\udc00b"}', "not valid JSON"),
    "surrogates in the wrong order": ("completions", b'{"prompt": "\\ude00\\ud83d"}', "not valid JSON"),
    "surrogate in a stop string": ("completions", b'{"prompt": "a", "stop": ["\\ud83d"]}', "not valid JSON"),
    "raw line end in a string": ("completions", b'{"prompt": "a\nb"}', "not valid JSON"),
    "NUL between": ("completions", b'{"prompt":\x00"a"}', "not valid JSON"),
    "NaN": ("completions", b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
    "Infinity": ("completions", b'{"prompt": "a", "top_p": -Infinity}', "not valid JSON"),
    "leading zero": ("completions", b'{"prompt": "a", "n": 01}', "not valid JSON"),
    "deep lists": ("completions", b'{"prompt": ' + b"[" * 100_000, "recursion"),
    "deep objects": ("chat", b'{"messages": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "recursion"),
    "a list": ("completions", b'[{"prompt": "a"}]', "must be a JSON object, got a list"),
    "a string": ("completions", b'"prompt"', "must be a JSON object, got a string"),
    "null": ("completions", b"null", "must be a JSON object, got null"),
    # Names.
    "unknown field": ("completions", text_body(temprature=1), "Unrecognized request argument supplied: temprature"),
    "unknown field that is null": ("completions", text_body(temprature=None), "supplied: temprature"),
    "unknown long field": ("completions", text_body(**{MARK * 5000: 1}), "Unrecognized request argument"),
    "field with a line end": ("completions", text_body(**{"a\r\nb": 1}), "supplied: a  b"),
    "a chat's field": ("completions", text_body(messages=HELLO), "argument supplied: messages"),
    "many fields": ("completions", text_body(**{f"x{i}": i for i in range(5000)}), "more than 1,000 fields"),
    "unknown stream option": ("chat", chat_body(stream=True, stream_options={"a": 1}), "supplied: stream_options.a"),
    "another model": ("chat", chat_body(model="gpt-5"), "does not exist"),
    "a path as model": ("chat", chat_body(model="../../etc/passwd"), "does not exist"),
    "no prompt": ("completions", b"{}", "you must provide the parameter prompt"),
    "null prompt": ("completions", text_body(prompt=None), "you must provide the parameter prompt"),
    "no messages": ("chat", b"{}", "you must provide the parameter messages"),
    "no input": ("responses", b"{}", "you must provide the parameter input"),
    # Types.
    "prompt is an object": ("completions", text_body(prompt={}), "prompt should be text"),
    "prompt is true": ("completions", text_body(prompt=True), "got a boolean"),
    "prompt of nulls": ("completions", text_body(prompt=[None]), "prompt should be text"),
    "mixed prompts": ("completions", text_body(prompt=["a", 1]), "prompt should be text"),
    "half ids": ("completions", text_body(prompt=[1, 2.5]), "whole numbers"),
    "ids and true": ("completions", text_body(prompt=[1, True]), "whole numbers"),
    "ids and text": ("completions", text_body(prompt=[1, "2"]), "whole numbers"),
    "nested too deep": ("completions", text_body(prompt=[[[1]]]), "whole numbers"),
    "temperature as text": ("completions", text_body(temperature="1"), "temperature should be a valid number"),
    "temperature true": ("completions", text_body(temperature=True), "temperature should be a valid number"),
    "max_tokens as text": ("completions", text_body(max_tokens="5"), "max_tokens should be a valid integer"),
    "max_tokens as float": ("completions", text_body(max_tokens=1.5), "max_tokens should be a valid integer"),
    "stream as text": ("completions", text_body(stream="yes"), "stream should be a valid boolean"),
    "model is a number": ("chat", chat_body(model=5), "model should be a valid string"),
    "stop is a number": ("completions", text_body(stop=5), "stop should be a string"),
    "stop of numbers": ("completions", text_body(stop=[1]), "stop should be a string"),
    "logit_bias is a list": ("completions", text_body(logit_bias=[1]), "logit_bias should be a valid dict"),
    "logit_bias of text": ("completions", text_body(logit_bias={"5": "a"}), "numbers as its values"),
    "logit_bias of true": ("completions", text_body(logit_bias={"5": True}), "numbers as its values"),
    "messages is a string": ("chat", chat_body(messages="hello"), "messages should be a valid list"),
    "a message is a string": ("chat", chat_body(messages=["hello"]), "messages[0] should be an object"),
    "salt is a list": ("completions", text_body(cache_salt=["a"]), "cache_salt should be a valid string"),
    # Ranges.
    "empty prompt": ("completions", text_body(prompt=""), "prompt is empty"),
    "no prompts": ("completions", text_body(prompt=[]), "empty list"),
    "an empty id list": ("completions", text_body(prompt=[[1], []]), "prompt is empty"),
    "negative id": ("completions", text_body(prompt=[-1]), "token id -1 is outside"),
    "id beyond the vocabulary": ("completions", text_body(prompt=[301]), "token id 301 is outside"),
    "id beyond int64": ("completions", text_body(prompt=[2**70]), "is outside"),
    "id of 4,000 digits": ("completions", b'{"prompt": [1' + b"0" * 4000 + b"]}", "a huge number is outside"),
    "temperature below": ("completions", text_body(temperature=-0.1), "temperature must be between"),
    "temperature 1e999": ("completions", b'{"prompt": "a", "temperature": 1e999}', "temperature should be a finite"),
    "top_p 0": ("completions", text_body(top_p=0), "top_p must be above 0"),
    "top_p above": ("completions", text_body(top_p=1.01), "top_p must be above 0 and at most 1"),
    "top_k below": ("completions", text_body(top_k=-1), "top_k should be greater than or equal to 0"),
    "top_k huge": ("completions", text_body(top_k=10**30), "top_k should be less than"),
    "max_tokens huge": (
        "chat",
        b'{"messages": [], "max_tokens": 1' + b"0" * 4000 + b"}",
        "max_tokens should be less than",
    ),
    "min_p above": ("completions", text_body(min_p=1.5), "min_p must be between"),
    "repetition_penalty 0": ("completions", text_body(repetition_penalty=0), "repetition_penalty must be"),
    "presence_penalty above": ("completions", text_body(presence_penalty=2.1), "presence_penalty must be between"),
    "max_tokens 0": ("completions", text_body(max_tokens=0), "max_tokens should be greater than or equal to 1"),
    "n 0": ("completions", text_body(n=0), "n should be greater than or equal to 1"),
    "n huge": ("completions", text_body(n=10**18), "more than the 64 choices"),
    "choices by prompts": ("completions", text_body(prompt=["a"] * 33, n=2), "more than the 64 choices"),
    "seed beyond": ("completions", text_body(seed=2**64), "seed should be less than"),
    "logprobs above": ("completions", text_body(logprobs=21), "logprobs should be less than or equal to 20"),
    "prompt_logprobs -1": ("completions", text_body(prompt_logprobs=-1), "prompt_logprobs should be greater"),
    "logit_bias above": ("completions", text_body(logit_bias={"5": 101}), "logit_bias must lie between"),
    "logit_bias 1e999": ("completions", b'{"prompt": "a", "logit_bias": {"5": 1e999}}', "logit_bias must"),
    "logit_bias of an unknown id": ("completions", text_body(logit_bias={"301": 1}), "no token id below 301"),
    "logit_bias of a word": ("completions", text_body(logit_bias={MARK * 100: 1}), "no token id"),
    "logit_bias of other digits": ("completions", text_body(logit_bias={"\u0663": 1}), "no token id"),
    "empty stop": ("completions", text_body(stop=[""]), "stop string must have 1 to"),
    "long stop": ("completions", text_body(stop=MARK * 2000), "stop string must have 1 to 4096"),
    "timeout 0": ("completions", text_body(timeout_s=0), "timeout_s should be greater than 0"),
    "salt too long": ("completions", text_body(cache_salt=MARK * 500), "cache_salt"),
    # What cannot be honoured.
    "best_of": ("completions", text_body(n=1, best_of=2), "best_of must equal n"),
    "suffix": ("completions", text_body(suffix="end"), "suffix is not supported"),
    "stream_options alone": ("chat", chat_body(stream_options={"include_usage": True}), "only allowed when stream"),
    "two limits": ("chat", chat_body(max_tokens=1, max_completion_tokens=1), "not both"),
    "top_logprobs alone": ("chat", chat_body(top_logprobs=3), "needs logprobs"),
    "tools without a template": ("chat", chat_body(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
    "functions": ("chat", chat_body(functions=[{"name": "f"}]), "send them as tools"),
    "forced call": ("chat", chat_body(tool_choice="required"), "tool_choice can be auto or none"),
    "response_format": ("chat", chat_body(response_format={"type": "json_schema"}), "response_format can only be text"),
    "audio": ("chat", chat_body(modalities=["text", "audio"]), "answers in text only"),
    "template of the request": ("chat", chat_body(chat_template="{{ 1 }}"), "argument supplied: chat_template"),
    "template arguments": ("chat", chat_body(chat_template_kwargs={"chat_template": "x"}), "cannot set chat_template"),
    "continuing a question": ("chat", chat_body(continue_final_message=True), "role assistant"),
    # Messages.
    "no message": ("chat", chat_body(messages=[]), "messages is empty"),
    "no role": ("chat", b'{"messages": [{"content": "a"}]}', "messages[0].role should be one of"),
    "unknown role": ("chat", said("a", role=MARK * 1000), "messages[0].role should be one of"),
    "role is a list": ("chat", said("a", role=["user"]), "messages[0].role should be one of"),
    "no content": ("chat", b'{"messages": [{"role": "user"}]}', "messages[0].content should be a string"),
    "null content": ("chat", said(None), "messages[0].content should be a string"),
    "content is a number": ("chat", said(5), "messages[0].content should be a string"),
    "no parts": ("chat", said([]), "got an empty list"),
    "a part is text": ("chat", said(["a"]), "messages[0].content[0] should be an object"),
    "a part without type": ("chat", said([{"text": "a"}]), "content[0].type should be text"),
    "a part's text is a number": ("chat", said([{"type": "text", "text": 5}]), "content[0].text should be a string"),
    "picture": ("chat", said([{"type": "image_url", "image_url": {"url": MARK * 9999}}]), "reads text only"),
    "sound": ("chat", said([{"type": "input_audio", "input_audio": {}}]), "reads text only"),
    "file": ("chat", said([{"type": "file", "file": {"file_id": "a"}}]), "reads text only"),
    "name is a number": ("chat", said("a", name=5), "messages[0].name should be a string"),
    "calls of a user": ("chat", said("a", tool_calls=[{}]), "role assistant"),
    "calls that are none": ("chat", said("a", role="assistant", tool_calls=[{}]), "tool_calls[0]"),
    # Responses.
    "input is a number": ("responses", answer_to(input=5), "input should be a string or a list"),
    "no items": ("responses", answer_to(input=[]), "an empty list"),
    "an item is text": ("responses", answer_to(input=["a"]), "input[0] should be an object"),
    "unknown item": ("responses", answer_to(input=[{"type": MARK * 999}]), "input[0].type should be"),
    "an item's picture": (
        "responses",
        answer_to(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        "input[0].content[0] is no text: this server reads text only",
    ),
    "the third item": (
        "responses",
        answer_to(instructions="be", input=[{"type": "reasoning"}, {"role": "user", "content": "a"}, {"role": "boss"}]),
        "input[2].role should be one of",
    ),
    "call without a name": (
        "responses",
        answer_to(input=[{"type": "function_call", "arguments": ""}]),
        "input[0].name",
    ),
    "output without a call": ("responses", answer_to(input=[{"type": "function_call_output"}]), "call_id"),
    "previous response": ("responses", answer_to(previous_response_id="resp_1"), "send the whole conversation"),
    "background": ("responses", answer_to(background=True), "/v1/jobs"),
    "search": ("responses", answer_to(tools=[{"type": "web_search"}]), "tools[0].type should be function"),
    "json answer": ("responses", answer_to(text={"format": {"type": "json_object"}}), "text.format can only be text"),
    "effort is a number": ("responses", answer_to(reasoning={"effort": 5}), "reasoning.effort should be a string"),
}

# What is large as well as bad, made only when it is used.
HUGE: dict[str, tuple[str, Any, str]] = {
    "500,000 stop strings": ("completions", lambda: text_body(stop=[MARK] * 500_000), "at most 64 stop strings"),
    "20,000 biases": ("completions", lambda: text_body(logit_bias={str(i): 1 for i in range(20_000)}), "at most 16384"),
    "5,000 bad items": ("chat", lambda: chat_body(messages=[MARK * 50] * 5000), "messages[0] should be an object"),
    "5,000 bad prompts": ("completions", lambda: text_body(prompt=["a"] + [{MARK: 1}] * 5000), "prompt should be text"),
    "1,000,000 objects": (
        "completions",
        lambda: b'{"prompt": [' + b"{}," * 10**6 + b"1]}",
        "500,000 objects and lists",
    ),
    "2,000,000 strings": ("completions", lambda: b'{"prompt": [' + b'"",' * 2 * 10**6 + b"1]}", "1,000,000 strings"),
    "objects after strings": (
        "completions",
        lambda: b'{"prompt": [' + b'"{",' * 1000 + b"{}," * 600_000 + b'"]"]}',
        "500,000 objects and lists",
    ),
    "1,000,000 ids": ("completions", lambda: text_body(prompt=[1] * 10**6), "1,000,000 tokens"),
    "more values than any prompt has": ("completions", lambda: b"[" + b"1," * 2_000_000 + b"1]", "values"),
    "1,000 prompts": ("completions", lambda: text_body(prompt=["a"] * 1000), "more than the 64 choices"),
    "a long text": ("completions", lambda: text_body(prompt=MARK * 250_000), "in its first"),
    "unclosed quote": ("completions", lambda: b'{"prompt": "' + MARK.encode() * 250_000, "not valid JSON"),
    "2,000 tools": ("chat", lambda: chat_body(tools=[{"type": MARK}] * 2000), "at most 1024 tools"),
    "many unknown names": ("chat", lambda: said("a", **{f"{MARK}{i}": 1 for i in range(5000)}), "no message has"),
}


def refusal_of(endpoint: str, body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        prepare_body(endpoint, body)
    return caught.value


def assert_decent(error: ApiError, words: str) -> None:
    text = json.dumps(error.body(), ensure_ascii=False)
    assert error.status in (400, 404)
    assert words in error.message
    assert len(text) < 1000 and text.isprintable()
    assert text.count(MARK) <= 100, "a refusal repeats its input"
    assert error.type == "invalid_request_error"


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_refused_in_one_clear_line(name: str) -> None:
    endpoint, body, words = BAD[name]
    assert_decent(refusal_of(endpoint, body), words)


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_bad_body_is_refused_before_it_costs_anything(name: str) -> None:
    endpoint, make, words = HUGE[name]
    body, best_s = make(), 10.0
    for _ in range(3):
        start_s = time.process_time()
        error = refusal_of(endpoint, body)
        best_s = min(best_s, time.process_time() - start_s)
    assert_decent(error, words)
    assert best_s < 0.1


def test_a_long_prompt_may_be_full_of_what_json_is_made_of() -> None:
    code = '{"a": [1, {"b": "c"}]}, ' * 300_000
    with pytest.raises(ApiError, match="in its first"):  # it is read, and then counted
        prepare_body("completions", text_body(prompt=code))
    assert prepare_body("completions", text_body(prompt="a", metadata={"dump": code})).works


def test_the_table_is_as_long_as_promised() -> None:
    assert len(BAD) >= 100


def test_a_refusal_names_its_parameter_and_code() -> None:
    unknown = refusal_of("completions", text_body(temprature=1))
    assert (unknown.param, unknown.code) == ("temprature", "unknown_parameter")
    model = refusal_of("chat", chat_body(model="other"))
    assert (model.status, model.param, model.code) == (404, "model", "model_not_found")
    ranged = refusal_of("completions", text_body(top_p=2))
    assert ranged.param == "top_p"
    long = refusal_of("completions", text_body(prompt=[1] * 5000))
    assert long.code == "context_length_exceeded" and "5,000" in long.message and "4,096" in long.message


def test_a_base_model_says_how_to_give_it_a_template() -> None:
    with pytest.raises(ApiError, match="--chat-template FILE") as caught:
        prepare_body("chat", chat_body(), make_text(template=None))
    assert caught.value.status == 400 and "/v1/completions" in caught.value.message


def test_a_served_name_is_the_only_name() -> None:
    settings = ServerSettings(served_name="alias")
    assert prepare_body("chat", chat_body(model="alias"), settings=settings).options.model == "alias"
    with pytest.raises(ApiError):
        prepare_body("chat", chat_body(model="tiny"), settings=settings)


@pytest.mark.parametrize(
    "tool",
    [
        "f",
        {"type": "function"},
        {"type": "function", "function": {"name": ""}},
        {"type": "function", "function": {"name": "a b"}},
        {"type": "function", "function": {"name": "f", "parameters": []}},
        {"type": "function", "function": {"name": "f", "description": 5}},
        {"type": "custom", "custom": {"name": "f"}},
    ],
)
def test_a_bad_tool_is_refused(tool: Any) -> None:
    with pytest.raises(ApiError, match=r"tools\[0\]"):
        prepare_body("chat", chat_body(tools=[tool]), make_text(TOOLS))


def test_deep_nesting_inside_allowed_depth_does_not_reach_the_stack() -> None:
    schema: dict[str, Any] = {}
    for _ in range(150):
        schema = {"properties": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    prepared = prepare_body("chat", chat_body(tools=[tool]), make_text(TOOLS))
    assert prepared.options.tools == ("f",)


def test_text_and_ids_of_a_model_without_tokenizer() -> None:
    text = make_text()
    text.tokenizer = None
    with pytest.raises(ApiError, match="no tokenizer"):
        prepare_body("completions", text_body(), text)
    assert len(prepare_body("completions", text_body(prompt=[1, 2, 3]), text, info=make_info()).works[0].token_ids) == 3
