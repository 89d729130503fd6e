"""Faults of other servers on prompts that are too long: cut in silence, refused late, or with wrong numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from longctx.server.prepare_pool import SMALL_BODY_BYTES
from tests.helpers.server import (
    LiveServer,
    metrics,
    words,
)
from tests.integration.server.conftest import POSITIONS

# A server takes its seconds to start.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]


# -- B110, B112: too long --------------------------------------------------------------------------------------------


def too_long_bodies() -> list[tuple[str, dict[str, Any], int]]:
    """(path, body, true number of prompt tokens or 0 where the tokenizer decides)."""
    text = words(POSITIONS)
    chat = [{"role": "user", "content": text}]
    return [
        ("/v1/completions", {"prompt": [5] * (POSITIONS + 7)}, POSITIONS + 7),
        ("/v1/completions", {"prompt": [5] * POSITIONS, "max_tokens": 1}, POSITIONS),
        ("/v1/completions", {"prompt": [5] * (POSITIONS - 10), "max_tokens": 11}, POSITIONS - 10),
        ("/v1/completions", {"prompt": text, "max_tokens": 5}, 0),
        ("/v1/completions", {"prompt": ["short", text], "max_tokens": 5}, 0),
        ("/v1/chat/completions", {"messages": chat}, 0),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": POSITIONS}, 0),
        ("/v1/responses", {"input": text}, 0),
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "tokens"), too_long_bodies())
def test_b110_too_long_is_a_400_with_both_numbers_before_any_work(
    live: LiveServer, path: str, body: dict[str, Any], tokens: int, stream: bool
) -> None:
    """vllm-project/vllm#33418: wrong numbers, a 500, a broken stream, or a refusal only after the prefill."""
    with live.client() as client:
        before = metrics(client)
        answer = client.post(path, json={**body, "stream": stream})
        if stream and len(answer.request.content) > SMALL_BODY_BYTES and answer.status_code == 200:
            [event] = (line for line in answer.text.splitlines() if line.startswith("data: {"))
            error = json.loads(event[6:])["error"]  # its head had left before its text was counted
        else:
            assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"
            error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"
        assert f"{POSITIONS:,}" in error["message"]
        if tokens:
            assert f"{tokens:,}" in error["message"]
        name = 'longctx_prefill_tokens_total{source="computed"}'
        assert metrics(client)[name] == before[name]


def test_b112_nothing_is_cut_silently(live: LiveServer) -> None:
    """ollama/ollama#3839: the front of the prompt is dropped, the answer is a 200, the count is of what was left."""
    prompt = "The secret is 4711. " + words(3 * POSITIONS)
    with live.client() as client:
        answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5})
        assert answer.status_code == 400 and "4711" not in answer.text
        for path in ("/tokenize", "/v1/plan"):
            refused = client.post(path, json={"prompt": prompt})
            assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        fits = client.post("/v1/completions", json={"prompt": [5] * 1000, "max_tokens": 1}).json()
        assert fits["usage"]["prompt_tokens"] == 1000
        whole = client.post("/tokenize", json={"prompt": words(3000)}).json()
        back = client.post("/detokenize", json={"tokens": whole["tokens"]}).json()
        assert back["prompt"] == words(3000) and whole["count"] == len(whole["tokens"])
