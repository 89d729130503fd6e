"""/tokenize, /detokenize and /v1/plan: what they answer and what they refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from longctx.models.tokenizer import encode_chat, encode_prompt
from longctx.server.errors import ApiError
from longctx.server.settings import ServerSettings
from longctx.server.text_tasks import perform
from tests.helpers.text_side import make_info, make_text

HELLO = [{"role": "user", "content": "hello"}]


def do(task: str, **body: Any) -> Any:
    return perform(task, json.dumps(body).encode(), make_text(), ServerSettings(), make_info())


def test_tokenize_gives_the_prompts_ids() -> None:
    answer = json.loads(do("tokenize", prompt="naïve 東京", return_token_strs=True))
    tokenizer = make_text().tokenizer
    assert answer["tokens"] == encode_prompt(tokenizer, "naïve 東京")
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 4096
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(answer["tokens"])
    assert json.loads(do("tokenize", prompt=""))["tokens"] == []


def test_tokenize_takes_messages_and_long_prompts() -> None:
    answer = json.loads(do("tokenize", messages=HELLO, add_generation_prompt=False))
    assert answer["tokens"] == encode_chat(make_text().tokenizer, HELLO, add_generation_prompt=False)
    long = json.loads(do("tokenize", prompt="a b " * 5000))
    assert long["tokens"] == encode_prompt(make_text().tokenizer, "a b " * 5000) and "warnings" not in long
    assert long["count"] == len(long["tokens"]) > 10_000


def test_detokenize_is_the_way_back() -> None:
    ids = json.loads(do("tokenize", prompt='say "東京"\n'))["tokens"]
    assert json.loads(do("detokenize", tokens=ids)) == {"prompt": 'say "東京"\n'}
    assert json.loads(do("detokenize", tokens=[])) == {"prompt": ""}


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"tokens": 5000}, 5000),
        ({"tokens": "128K"}, 131072),
        ({"prompt": [1, 2, 3]}, 4),
        ({"prompt": [1, 2, 3], "max_tokens": 10}, 13),
    ],
)
def test_plan_counts_prompt_and_answer(body: dict[str, Any], tokens: int) -> None:
    assert do("plan", **body) == (tokens, 1)
    assert do("plan", **body, concurrency=7) == (tokens, 7)


def test_plan_counts_text_and_messages() -> None:
    tokenizer = make_text().tokenizer
    assert do("plan", prompt="the fox", max_tokens=2)[0] == len(encode_prompt(tokenizer, "the fox")) + 2
    assert do("plan", messages=HELLO)[0] == len(encode_chat(tokenizer, HELLO)) + 1


@pytest.mark.parametrize(
    ("task", "body", "words"),
    [
        ("tokenize", {}, "either prompt or messages"),
        ("tokenize", {"prompt": "a", "messages": HELLO}, "either prompt or messages"),
        ("tokenize", {"prompt": ["a"]}, "prompt should be a valid string"),
        ("detokenize", {}, "must provide the parameter tokens"),
        ("detokenize", {"tokens": "1"}, "tokens should be a valid list"),
        ("detokenize", {"tokens": [301]}, "outside the model's vocabulary"),
        ("detokenize", {"tokens": [1.0]}, "whole numbers"),
        ("plan", {}, "send one of tokens"),
        ("plan", {"tokens": 5, "prompt": "a"}, "send one of tokens"),
        ("plan", {"tokens": 5, "max_tokens": 5}, "leave max_tokens out"),
        ("plan", {"tokens": 0}, "tokens"),
        ("plan", {"tokens": True}, "whole number"),
        ("plan", {"tokens": "many"}, "tokens"),
        ("plan", {"tokens": "9" * 5000}, "tokens"),
        ("plan", {"tokens": [5]}, "whole number"),
        ("plan", {"prompt": ["a", "b"]}, "send one prompt"),
        ("plan", {"tokens": 5, "concurrency": 0}, "concurrency should be"),
    ],
)
def test_what_makes_no_sense_is_refused(task: str, body: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        do(task, **body)
    assert caught.value.status == 400 and len(json.dumps(caught.value.body())) < 1000
