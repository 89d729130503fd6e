"""What a job's body becomes: an order that is checked now and runs the same at any time."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from longctx.server.errors import ApiError
from longctx.server.job_body import Order, take_order
from longctx.server.settings import ServerSettings
from longctx.server.text_tasks import perform
from tests.helpers.text_side import make_info, make_text

BODY: dict[str, Any] = {"prompt": "the quick fox", "max_tokens": 4}


def take(body: Any = BODY, endpoint: str = "/v1/completions", **fields: Any) -> Order:
    raw = json.dumps({"endpoint": endpoint, "body": body, **fields}).encode()
    return take_order(raw, make_text(), ServerSettings(), make_info())


def body_of(order: Order) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(order.body)
    return fields


def test_an_order_crosses_a_process_border() -> None:
    order = take(ttl_s=5, idempotency_key="k")
    assert pickle.loads(pickle.dumps(order)) == order
    assert (order.endpoint, order.ttl_s, order.idempotency_key, order.warnings) == ("completions", 5, "k", ())
    raw = json.dumps({"endpoint": "/v1/completions", "body": {**BODY, "seed": 3}}).encode()
    assert perform("job", raw, make_text(), ServerSettings(), make_info()) == take({**BODY, "seed": 3})


def test_a_seed_is_drawn_once_for_all_runs_where_one_is_needed() -> None:
    seeds = [body_of(take())["seed"] for _ in range(8)]
    assert len(set(seeds)) == 8 and all(0 <= seed < 2**53 for seed in seeds)
    assert isinstance(body_of(take({**BODY, "seed": None}))["seed"], int)
    assert body_of(take({**BODY, "seed": 7}))["seed"] == 7
    assert body_of(take({**BODY, "seed": 0}))["seed"] == 0
    greedy = take({**BODY, "temperature": 0})
    assert "seed" not in body_of(greedy) and greedy.warnings == ()


def test_the_digest_names_what_was_asked_and_nothing_else() -> None:
    first = take({"prompt": "é", "max_tokens": 4})
    assert take({"max_tokens": 4, "prompt": "é"}).digest == first.digest, "neither the order of fields nor the seed"
    others = [
        take({"prompt": "e", "max_tokens": 4}),
        take({"prompt": "é", "max_tokens": 5}),
        take({"prompt": "é", "max_tokens": 4, "seed": 1}),
        take({"prompt": "é", "max_tokens": 4}, ttl_s=5),
    ]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    assert len({order.digest for order in [first, *others, take(chat, "/v1/chat/completions")]}) == 6


def test_what_needs_a_stream_needs_none_in_a_job() -> None:
    followed = take({**BODY, "return_progress": True, "stream_options": {"include_usage": True}})
    assert body_of(followed)["stream"] is True and followed.warnings == ()
    assert body_of(take({**BODY, "stream": False, "return_progress": True}))["stream"] is True
    assert "stream" not in body_of(take())
    # The logprobs of a prompt come with the whole answer, which a job has.
    assert "stream" not in body_of(take({**BODY, "prompt_logprobs": 1}))
    with pytest.raises(ApiError, match="stream"):
        take({**BODY, "stream": 0, "return_progress": True})


def test_warnings_are_the_endpoints() -> None:
    assert "service_tier" in take({**BODY, "service_tier": "flex"}).warnings[0]


@pytest.mark.parametrize("max_tokens", [4096, 10**9])
def test_what_can_never_fit_is_refused_now(max_tokens: int) -> None:
    num_prompt_tokens = len(make_text().encode("the quick fox"))
    take({**BODY, "max_tokens": 4096 - num_prompt_tokens})
    with pytest.raises(ApiError, match=rf"= {num_prompt_tokens + max_tokens:,} tokens.*has 4,096.*at most") as error:
        take({**BODY, "max_tokens": max_tokens})
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": "completions"}, "one of /v1/completions, /v1/chat/completions, /v1/responses"),
        ({"model": "tiny"}, "job's own body"),
        ({"idempotency_key": "k" * 256}, "1 to 255"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"body": {**BODY, "temperature": -1}}, "temperature"),
        ({"body": {**BODY, "nonsense": 1}}, "nonsense"),
        ({"body": [BODY]}, "body"),
    ],
)
def test_a_bad_order_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as error:
        take(**{"endpoint": "/v1/completions", "body": BODY, **fields})
    assert error.value.status == 400


def test_unicode_stays_what_it_was() -> None:
    prompt = "naïve 東京 👩‍👩‍👧‍👦 \u2028 \x00"
    assert body_of(take({"prompt": prompt}))["prompt"] == prompt
