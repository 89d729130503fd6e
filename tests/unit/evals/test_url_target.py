"""Servers of several makes, as their answers look on the wire; none is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from longctx.errors import EngineError, LongctxError
from longctx.evals import url_target
from longctx.evals.lengths import Fitter
from longctx.evals.url_target import UNCOUNTED, URLTarget
from tests.helpers.tokenizers import byte_level_tokenizer

URL = "http://server.test"
Handler = Callable[[httpx.Request], httpx.Response]


def stream(*chunks: Any, done: bool = True) -> httpx.Response:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + (["data: [DONE]\n\n"] if done else [])
    return httpx.Response(200, text=": ping\n\n" + "".join(lines), headers={"content-type": "text/event-stream"})


def usage(prompt: int = 7, cached: int | None = 0) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": 2, **details}}


def piece(text: str, chat: bool = False, reason: str | None = None) -> dict[str, Any]:
    return {
        "choices": [
            {"delta": {"content": text}, "finish_reason": reason} if chat else {"text": text, "finish_reason": reason}
        ]
    }


class Server:
    """Answers by path; notes what it was sent."""

    def __init__(self, **paths: Callable[[Any], httpx.Response] | httpx.Response):
        self.paths: dict[str, Any] = {f"/{name.replace('__', '/')}": answer for name, answer in paths.items()}
        self.paths.setdefault("/v1/models", httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 512}]}))
        self.sent: list[tuple[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body = json.loads(request.content) if request.content else None
        self.sent.append((path, body))
        answer = self.paths.get(path, httpx.Response(404, json={"detail": "Not Found"}))
        return answer if isinstance(answer, httpx.Response) else answer(body)


@pytest.fixture
def open_target(monkeypatch: pytest.MonkeyPatch) -> Callable[..., URLTarget]:
    real = httpx.Client
    monkeypatch.setattr(url_target, "_BUSY_WAIT_S", 0.0)

    def opened(server: Handler, **options: Any) -> URLTarget:
        monkeypatch.setattr(
            url_target.httpx, "Client", lambda **kwargs: real(transport=httpx.MockTransport(server), **kwargs)
        )
        return URLTarget(URL, **options)

    return opened


def words(body: Any) -> httpx.Response:
    """vLLM's and this project's /tokenize, for a base model: no template, so messages are refused."""
    if "prompt" not in body:
        return httpx.Response(400, json={"error": {"message": "no chat template"}})
    return httpx.Response(200, json={"count": len(body["prompt"].split()), "tokens": []})


def test_a_base_model_is_asked_for_completions(open_target: Any) -> None:
    server = Server(
        tokenize=words, v1__completions=lambda body: stream(piece(" 12"), piece("345", reason="length"), usage())
    )
    target = open_target(server)
    assert (target.name, target.chat, target.longest) == ("m", False, 512)
    assert target.count("one two three") == 3
    answer = target.ask("hello", 5, "salt")
    assert (answer.text, answer.prompt_tokens, answer.completion_tokens) == (" 12345", 7, 2)
    assert (answer.cached_tokens, answer.finish_reason) == (0, "length")
    assert server.sent[-1][1] == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt": "hello",
        "cache_salt": "salt",
    }


def test_llama_cpp_counts_by_its_template(open_target: Any) -> None:
    server = Server(
        **{
            "apply-template": lambda body: httpx.Response(
                200, json={"prompt": f"<s> {body['messages'][0]['content']} </s>"}
            )
        },
        tokenize=lambda body: (
            httpx.Response(200, json={"tokens": body["content"].split()})
            if "content" in body
            else httpx.Response(500, json={"error": {"message": "content is missing"}})
        ),
        v1__chat__completions=lambda body: stream(piece("", True), piece("yes", True, "stop"), usage(cached=None)),
    )
    target = open_target(server)
    assert target.chat and target.count("a b") == 4
    answer = target.ask("hello", 5, None)
    assert answer.text == "yes" and answer.cached_tokens is None and "cache_salt" not in server.sent[-1][1]
    assert server.sent[-1][1]["messages"] == [{"role": "user", "content": "hello"}]


def test_without_tokenize_a_tokenizer_is_asked_for(open_target: Any, tmp_path: Path) -> None:
    server = Server()
    with pytest.raises(LongctxError, match=r"has no /tokenize.*--tokenizer FOLDER"):
        open_target(server)
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    target = open_target(server, tokenizer=str(tmp_path))
    assert not target.chat and target.count("the quick brown fox") == len(tokenizer("the quick brown fox").input_ids)
    with pytest.raises(LongctxError, match=r"--tokenizer .*nowhere cannot be read"):
        open_target(server, tokenizer=str(tmp_path / "nowhere"))


def test_a_salt_that_is_refused_is_left_out(open_target: Any) -> None:
    def answer(body: Any) -> httpx.Response:
        if "cache_salt" in body:
            return httpx.Response(
                400, json={"error": {"message": "Unrecognized request argument supplied: cache_salt"}}
            )
        return stream(piece("x"), usage())

    server = Server(tokenize=words, v1__completions=answer)
    target = open_target(server)
    assert target.ask("hello", 5, "salt").text == "x" and target.ask("hello", 5, "other").text == "x"
    assert sum(path == "/v1/completions" for path, _ in server.sent) == 3, "it is not tried again and again"


def test_a_busy_server_is_waited_for(open_target: Any) -> None:
    answers = iter([httpx.Response(503, json={"error": {"message": "queue full"}}), httpx.Response(429), None])
    server = Server(tokenize=words, v1__completions=lambda body: next(answers) or stream(piece("x"), usage()))
    assert open_target(server).ask("hello", 5, None).text == "x"


def test_a_refusal_is_passed_on(open_target: Any) -> None:
    server = Server(tokenize=words, v1__completions=httpx.Response(400, json={"error": {"message": "too\nlong"}}))
    with pytest.raises(LongctxError, match="answered 400: too long"):
        open_target(server).ask("hello", 5, "salt")


def test_an_error_after_the_head_is_one(open_target: Any) -> None:
    failing = stream(piece("x"), {"error": {"message": "the engine died"}})
    with pytest.raises(EngineError, match="the engine died"):
        open_target(Server(tokenize=words, v1__completions=failing)).ask("hello", 5, None)
    cut = stream(piece("x"), done=False)
    with pytest.raises(EngineError, match="without a usage"):
        open_target(Server(tokenize=words, v1__completions=cut)).ask("hello", 5, None)


def test_a_broken_connection_names_the_server(open_target: Any) -> None:
    def broken(body: Any) -> httpx.Response:
        raise httpx.ReadError("reset by peer")

    with pytest.raises(EngineError, match=r"server.test broke off: reset by peer"):
        open_target(Server(tokenize=words, v1__completions=broken)).ask("hello", 5, None)
    with pytest.raises(LongctxError, match="cannot be reached"):
        open_target(Server(v1__models=broken))


def test_a_text_too_long_to_be_counted_does_not_end_the_search(open_target: Any) -> None:
    """A server may refuse to count what it could never read; a length is looked for from both sides."""

    def strict(body: Any) -> httpx.Response:
        if len(body.get("prompt", "").split()) > 300:
            return httpx.Response(400, json={"error": {"message": "far too long"}})
        return words(body)

    target = open_target(Server(tokenize=strict))
    assert target.count("word " * 1000) == UNCOUNTED
    fitted = Fitter(target.count).fit(lambda size, padding: "word " * (7 * size + padding), 200)
    assert fitted.tokens == 200


@pytest.mark.parametrize(
    ("models", "wanted", "message"),
    [
        (httpx.Response(200, json={"data": []}), None, "serves no model"),
        (httpx.Response(200, json={"data": [{"id": "a"}]}), "b", "does not serve 'b' but a"),
        (httpx.Response(401, json={"error": {"message": "no key"}}), None, "answered 401: no key"),
    ],
)
def test_what_the_server_serves(open_target: Any, models: httpx.Response, wanted: str | None, message: str) -> None:
    with pytest.raises(LongctxError, match=message):
        open_target(Server(v1__models=models, tokenize=words), model=wanted)


def test_the_key_is_sent_and_an_address_is_needed(open_target: Any) -> None:
    seen = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return Server(tokenize=words)(request)

    open_target(handler, api_key="k")
    assert set(seen) == {"Bearer k"}
    with pytest.raises(LongctxError, match="must begin with http"):
        URLTarget("server.test")
