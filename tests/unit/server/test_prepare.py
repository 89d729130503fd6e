"""What a good body becomes: ids by the model's rules, options mapped as OpenAI has them, warnings for idle settings."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from longctx.models.tokenizer import encode_chat, encode_prompt
from longctx.server.errors import ApiError
from longctx.server.text_side import UnreadText
from longctx.server.work import Prepared
from tests.helpers.text_side import CHAT, TOOLS, make_text, prepare_body

HELLO = [{"role": "user", "content": "hello"}]
SEARCH = {"type": "function", "function": {"name": "search", "description": "finds", "parameters": {"type": "object"}}}


def completion(**fields: Any) -> Prepared:
    return prepare_body("completions", {"prompt": "the quick fox", **fields})


def chat(messages: list[Any] | None = None, template: str = CHAT, **fields: Any) -> Prepared:
    return prepare_body("chat", {"messages": messages or HELLO, **fields}, make_text(template))


def rendered(prepared: Prepared) -> str:
    return make_text().decode(prepared.works[0].token_ids)


def test_prompts_of_all_four_shapes() -> None:
    text = make_text()
    ids = encode_prompt(text.tokenizer, "the quick fox")
    assert completion().works[0].token_ids.tolist() == ids
    assert completion(prompt=ids).works[0].token_ids.tolist() == ids
    for prompt in (["the quick fox", "over"], [ids, encode_prompt(text.tokenizer, "over")]):
        first, second = completion(prompt=prompt).works
        assert first.token_ids.tolist() == ids and second.token_ids.tolist() == encode_prompt(text.tokenizer, "over")
        assert first.token_ids.dtype == np.int32


def test_choices_are_in_order_and_draw_their_own() -> None:
    works = completion(prompt=["a", "b"], n=3, seed=7).works
    assert [work.choice for work in works] == [0, 1, 2, 3, 4, 5]
    assert [work.params.seed for work in works] == [7, 8, 9, 7, 8, 9]
    assert works[0].token_ids is works[2].token_ids and works[0].token_ids is not works[3].token_ids
    assert [work.params.seed for work in completion(n=2).works] == [None, None]


@pytest.mark.parametrize(("sent", "used"), [(0, 0), (-1, 2**64 - 1), (2**63, 2**63), (-(2**63), 2**63)])
def test_signed_seeds_of_openai_are_taken(sent: int, used: int) -> None:
    assert completion(seed=sent).works[0].params.seed == used


def test_the_last_seed_wraps_around() -> None:
    assert [work.params.seed for work in completion(seed=2**64 - 1, n=2).works] == [2**64 - 1, 0]


def test_defaults_are_openais() -> None:
    params = completion().works[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (16, 1.0, 1.0, None)
    params = chat().works[0].params
    assert (params.max_tokens, params.temperature, params.logprobs) == (None, 1.0, None)


def test_every_option_reaches_the_sampler() -> None:
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.3,
        "seed": 11,
        "ignore_eos": True,
        "max_tokens": 9,
        "prompt_logprobs": 2,
        "logprobs": 3,
    }
    prepared = completion(**options, logit_bias={"7": -100, "5": 1.5}, stop=["a", "b"])
    params = prepared.works[0].params
    assert {name: getattr(params, name) for name in options} == options
    assert params.logit_bias == ((5, 1.5), (7, -100.0)) and params.stop == ("a", "b")
    assert (prepared.options.logprobs, prepared.options.prompt_logprobs) == (3, 2)


@pytest.mark.parametrize(("stop", "used"), [(None, ()), ("x", ("x",)), ([], ()), (["x"] * 64, ("x",) * 64)])
def test_stop(stop: Any, used: tuple[str, ...]) -> None:
    assert completion(stop=stop).works[0].params.stop == used


def test_null_stands_for_an_absent_field() -> None:
    names = ("n", "stream", "echo", "temperature", "stream_options", "logit_bias", "ignore_eos", "user", "suffix")
    nulls = completion(**dict.fromkeys(names))
    assert nulls.options == completion().options and nulls.works[0].params == completion().works[0].params
    assert chat(stream=True, stream_options={"include_usage": None}).options.include_usage is False


def test_what_the_reply_must_know() -> None:
    options = completion(
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        return_progress=True,
        cache_salt="mine",
        timeout_s=12.5,
        n=2,
    ).options
    assert (options.model, options.stream, options.include_usage, options.return_progress) == ("tiny", True, True, True)
    assert (options.cache_salt, options.timeout_s, options.n, options.warnings) == ("mine", 12.5, 2, ())


def test_echo_repeats_each_prompt_and_its_logprobs() -> None:
    ids = encode_prompt(make_text().tokenizer, "over the dog")
    assert completion(prompt=["a b", "c"], echo=True).options.echo == ("a b", "c")
    assert completion(prompt=[ids], echo=True).options.echo == ("over the dog",)
    assert completion().options.echo is None
    prepared = completion(echo=True, logprobs=2)
    assert prepared.works[0].params.prompt_logprobs == 2 == prepared.options.prompt_logprobs
    assert completion(logprobs=2).works[0].params.prompt_logprobs is None


def test_chat_logprobs_need_to_be_asked_for() -> None:
    assert chat(logprobs=True).works[0].params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).options.logprobs == 4
    assert chat(logprobs=False).options.logprobs is None


def test_max_completion_tokens_is_max_tokens() -> None:
    assert chat(max_completion_tokens=5).works[0].params.max_tokens == 5
    assert chat(max_tokens=6).works[0].params.max_tokens == 6


def test_a_chat_is_what_transformers_makes_of_it() -> None:
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "naïve 東京 👩‍👩‍👧‍👦"}]
    prepared = chat(messages)
    assert prepared.works[0].token_ids.tolist() == encode_chat(make_text().tokenizer, messages)
    assert prepared.endpoint == "chat" and rendered(prepared).endswith("<|start|>assistant\n")


def test_text_parts_are_joined_and_developers_become_systems() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    plain = [{"role": "system", "content": "be"}, {"role": "user", "content": "a\nb"}]
    assert rendered(chat([{"role": "developer", "content": "be"}, {"role": "user", "content": parts}])) == rendered(
        chat(plain)
    )
    knows = CHAT + "{# developer #}"
    assert "<|start|>developer" in rendered(chat([{"role": "developer", "content": "be"}], knows))


def test_an_empty_answer_may_be_sent_back() -> None:
    messages = [*HELLO, {"role": "assistant", "content": None}, {"role": "user", "content": "again"}]
    assert "<|start|>assistant\n<|end|>" in rendered(chat(messages))


def test_the_answer_may_go_on_with_the_last_message() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "The key is"}]
    assert rendered(chat(begun, continue_final_message=True)).endswith("The key is")


def test_tools_reach_a_template_that_knows_them() -> None:
    prepared = chat(template=TOOLS, tools=[SEARCH], tool_choice="auto")
    assert '"name": "search"' in rendered(prepared) and prepared.options.tools == ("search",)
    silent = chat(template=TOOLS, tools=[SEARCH], tool_choice="none")
    assert "search" not in rendered(silent) and silent.options.tools == ()
    assert chat(tools=[], tool_choice="auto").options.tools == ()


def test_calls_come_back_with_their_arguments_as_an_object() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "key"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "c1", "content": "4711"},
    ]
    text = rendered(chat(messages, TOOLS, tools=[SEARCH]))
    assert '<tool_call>{"name": "search", "arguments": {"q": "key"}}</tool_call>' in text and "4711" in text
    call["function"]["arguments"] = "no json"  # type: ignore[index]
    assert '"arguments": "no json"' in rendered(chat(messages, TOOLS))


def test_template_variables_that_the_template_does_not_read_are_named() -> None:
    assert rendered(chat(template=TOOLS, chat_template_kwargs={"enable_thinking": False})).endswith("<think></think>")
    prepared = chat(chat_template_kwargs={"enable_thinking": False})
    assert "does not read enable_thinking" in prepared.options.warnings[0]
    assert "reasoning_effort has no effect" in chat(reasoning_effort="low").options.warnings[0]
    knows = CHAT + "{{ reasoning_effort }}"
    assert rendered(chat(template=knows, reasoning_effort="low")).endswith("low")
    assert chat(template=knows, reasoning_effort="low").options.warnings == ()


@pytest.mark.parametrize(
    "name", ["messages", "tools", "param", "tokenizer", "self", "tokenize", "add_generation_prompt"]
)
def test_variables_cannot_take_the_place_of_arguments(name: str) -> None:
    with pytest.raises(ApiError, match=f"cannot set {name}"):
        chat(template=CHAT + "{{" + name + "}}", chat_template_kwargs={name: []})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"store": True}, "store has no effect"),
        ({"service_tier": "flex"}, "service_tier has no effect"),
        ({"prompt_cache_key": "k"}, "cache_salt keeps caches apart"),
        ({"verbosity": "low"}, "verbosity has no effect"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction has no effect"),
        ({"return_progress": True}, "return_progress has no effect without stream"),
        ({"temperature": 0, "top_p": 0.5, "seed": 3}, "top_p, seed: no effect at temperature 0"),
    ],
)
def test_settings_without_effect_are_warned_about(fields: dict[str, Any], words: str) -> None:
    [warning] = chat(**fields).options.warnings
    assert words in warning


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "x", "store": False, "service_tier": "auto"},
        {"temperature": 0, "top_p": 1, "top_k": 0, "parallel_tool_calls": False, "modalities": ["text"]},
        {"response_format": {"type": "text"}, "reasoning_effort": None, "tool_choice": "none"},
    ],
)
def test_what_is_harmless_is_taken_without_a_word(fields: dict[str, Any]) -> None:
    assert chat(**fields).options.warnings == ()


def test_an_unknown_field_of_a_message_is_ignored_but_named() -> None:
    prepared = chat([{"role": "user", "content": "hello", "weight": 1, "annotations": []}])
    assert prepared.options.warnings == ("messages: the field weight is ignored",)
    assert rendered(prepared) == rendered(chat())


def test_a_template_that_refuses_messages_says_why() -> None:
    picky = "{% if messages[0].role != 'system' %}{{ raise_exception('system first, please') }}{% endif %}"
    with pytest.raises(ApiError, match="system first, please") as caught:
        chat(template=picky)
    assert (caught.value.status, caught.value.code) == (400, "invalid_messages")


def test_a_refusal_by_a_template_is_bounded() -> None:
    loud = "{{ raise_exception(messages[0].content) }}"
    with pytest.raises(ApiError) as caught:
        chat([{"role": "user", "content": "x" * 50_000}], loud)
    assert len(json.dumps(caught.value.body())) < 1000


def test_responses_are_chats() -> None:
    prepared = prepare_body("responses", {"input": "hello", "instructions": "short", "max_output_tokens": 5})
    assert rendered(prepared) == rendered(
        chat([{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}])
    )
    assert prepared.works[0].params.max_tokens == 5
    assert prepared.options.extra == {"instructions": "short", "max_output_tokens": 5}


def test_a_whole_agents_conversation_is_one_input() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "where is the key"}]},
        {"type": "reasoning", "id": "r1", "summary": []},
        {"type": "message", "role": "assistant", "id": "m1", "status": "completed", "content": [
            {"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "search", "arguments": '{"q": 1}', "id": "f1"},
        {"type": "function_call", "call_id": "c2", "name": "search", "arguments": '{"q": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "here"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "there"}]},
    ]  # fmt: skip
    tool = {"type": "function", "name": "search", "parameters": {"type": "object"}, "strict": True}
    prepared = prepare_body("responses", {"input": items, "tools": [tool]}, make_text(TOOLS))
    text = rendered(prepared)
    assert text.count("<|start|>assistant") == 2  # one turn with its two calls, and the one to come
    assert 'I look.<tool_call>{"name": "search", "arguments": {"q": 1}}</tool_call><tool_call>' in text
    assert text.index("here") < text.index("there") and prepared.options.tools == ("search",)
    assert prepared.options.warnings == ()


def test_responses_logprobs_and_idle_fields() -> None:
    body = {"input": "a", "include": ["message.output_text.logprobs"]}
    assert prepare_body("responses", body).options.logprobs == 0
    assert prepare_body("responses", {"input": "a", "top_logprobs": 2}).works[0].params.logprobs == 2
    prepared = prepare_body("responses", {"input": "a", "truncation": "auto", "reasoning": {"effort": "low"}})
    assert len(prepared.options.warnings) == 2
    assert prepare_body("responses", {"input": "a", "truncation": "disabled", "store": False}).options.warnings == ()


def test_several_prompts_are_refused_together_when_one_is_too_long() -> None:
    """Else the first is computed in vain before the engine refuses the second."""
    with pytest.raises(ApiError, match=r"4,096.*at most 4,090") as caught:
        completion(prompt=[[5], [5] * 6], max_tokens=4091)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("completions", {"prompt": ["hello"] * 2, "n": 2, "stream": True, "return_progress": True, "logprobs": 2}),
        ("completions", {"prompt": [5, 6], "echo": True, "timeout_s": 7}),
        ("chat", {"messages": HELLO, "stream": True, "tools": [SEARCH], "user": "me", "store": True}),
        ("responses", {"input": "hello", "metadata": {"a": "b"}, "instructions": "be brief"}),
    ],
)
def test_fields_are_checked_without_their_text(endpoint: str, fields: dict[str, Any]) -> None:
    """The options are those of the whole preparation; neither tokenizer nor template is called."""
    whole, unread = make_text(TOOLS), UnreadText(make_text(TOOLS))
    unread.tokenizer = SimpleNamespace(chat_template="a template")
    options = prepare_body(endpoint, fields, whole).options
    assert replace(prepare_body(endpoint, fields, unread).options, echo=options.echo) == options
    for bad in ({"temperature": -1}, {"tools": 3}, {"n": -1}, {"no_such": 1}):
        with pytest.raises(ApiError):
            prepare_body(endpoint, {**fields, **bad}, unread)


def test_a_base_model_is_told_before_a_conversation_is_read() -> None:
    with pytest.raises(ApiError) as caught:
        prepare_body("chat", {"messages": HELLO}, UnreadText(make_text(None)))
    assert caught.value.code == "no_chat_template"


def test_prepared_work_and_refusals_cross_processes() -> None:
    prepared = completion(n=2)
    copy = pickle.loads(pickle.dumps(prepared))
    assert copy.options == prepared.options and copy.works[0].params == prepared.works[0].params
    assert copy.works[0].token_ids is copy.works[1].token_ids
    error = ApiError(429, "later", type="rate_limit_error", code="queue_full", param="x", retry_after_s=3.0)
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


def test_a_body_may_come_in_any_buffer() -> None:
    raw = json.dumps({"prompt": "a"}).encode()
    for body in (raw, bytearray(raw), memoryview(raw)):
        assert len(prepare_body("completions", bytes(body)).works) == 1
