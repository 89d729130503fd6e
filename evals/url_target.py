"""A server behind an OpenAI-compatible address as the one who is asked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import httpx
from transformers import AutoTokenizer

from longctx.errors import EngineError, LongctxError
from longctx.evals.target import Answer

_BUSY = (429, 503)
_BUSY_TRIES, _BUSY_WAIT_S = 30, 2.0
_TOO_LONG = (400, 413, 422)
UNCOUNTED = 1 << 40
"""The tokens of a text that the server refuses to count, as it may for one far beyond what it can read."""


class URLTarget:
    """Asks `/v1/completions`, or `/v1/chat/completions` with `chat`, streamed and greedily. Owns its connections.

    Tokens are counted by the server's `/tokenize` (as this project, vLLM and llama.cpp have it), or by `tokenizer`, a
    local folder. `cache_salt` is sent while the server takes it.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        chat: bool | None = None,
        tokenizer: str | None = None,
    ):
        """`model` None: the first that the server names. `chat` None: if the model has a template."""
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise LongctxError(f"--url {url} must begin with http:// or https://")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # A huge prompt may be read for minutes before the first byte comes.
        timeout = httpx.Timeout(connect=10.0, read=None, write=600.0, pool=10.0)
        self._http = httpx.Client(headers=headers, timeout=timeout)
        card = self._model_card(model)
        self.name = str(card.get("id") or model)
        lengths = (card.get(key) for key in ("longest_request", "max_model_len"))
        self.longest: int | None = next((int(n) for n in lengths if isinstance(n, int)), None)
        self._tokenizer: Any = None if tokenizer is None else _load_tokenizer(tokenizer)
        self._salts, self._refusal = True, ""
        self.chat = True if chat is None else chat
        self._counter = ""
        self._counter = self._find_counter(chat)

    def count(self, prompt: str) -> int:
        tokens = self._counted(self._counter, prompt)
        if tokens is None:
            raise EngineError(f"{self.url} does not count tokens any more, though it did before: {self._refusal}")
        return tokens

    def ask(self, prompt: str, max_tokens: int, salt: str | None) -> Answer:
        body: dict[str, Any] = {
            "model": self.name,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        if salt is not None and self._salts:
            try:
                return self._stream(path, body | {"cache_salt": salt})
            except _Refused as error:
                if "cache_salt" not in str(error):
                    raise
                self._salts = False
        return self._stream(path, body)

    def config(self) -> Mapping[str, Any]:
        return {"model": self.name, "url": self.url, "chat": self.chat, "counted_by": self._counter}

    def sizes(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        self._http.close()

    def _stream(self, path: str, body: Mapping[str, Any]) -> Answer:
        start_s = time.perf_counter()
        first_s, parts, reason, usage = None, [], None, None
        for chunk in self._chunks(path, body):
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                piece = (choice.get("delta") or {}).get("content") if self.chat else choice.get("text")
                if piece:
                    first_s = first_s or time.perf_counter() - start_s
                    parts.append(piece)
                reason = choice.get("finish_reason") or reason
        if usage is None:
            raise EngineError(f"{self.url} answered without a usage, so it cannot be told what it read")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            text="".join(parts),
            prompt_tokens=int(usage["prompt_tokens"]),
            completion_tokens=int(usage.get("completion_tokens") or 0),
            cached_tokens=details.get("cached_tokens"),
            finish_reason=str(reason),
            ttft_s=first_s,
            seconds=time.perf_counter() - start_s,
        )

    def _chunks(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The stream's JSON objects; waits while the server says it is busy."""
        for attempt in range(_BUSY_TRIES):
            with self._sent(path, body) as response:
                if response.status_code in _BUSY and attempt + 1 < _BUSY_TRIES:
                    response.read()
                    time.sleep(_BUSY_WAIT_S)
                    continue
                if response.status_code >= 400:
                    response.read()
                    raise _Refused(f"{self.url}{path} answered {response.status_code}: {_message(response)}")
                yield from _events(response)
                return

    def _sent(self, path: str, body: Mapping[str, Any]) -> Any:
        return _Reported(self._http.stream("POST", f"{self.url}{path}", json=dict(body)), self.url)

    def _model_card(self, wanted: str | None) -> dict[str, Any]:
        response = self._request("GET", "/v1/models")
        if response.status_code >= 400:
            raise LongctxError(f"{self.url}/v1/models answered {response.status_code}: {_message(response)}")
        cards = [card for card in response.json().get("data", ()) if isinstance(card, dict)]
        names = [str(card.get("id")) for card in cards]
        if wanted is not None and wanted not in names:
            raise LongctxError(f"{self.url} does not serve {wanted!r} but {', '.join(names) or 'nothing'}")
        if not cards:
            raise LongctxError(f"{self.url} serves no model")
        return cards[0] if wanted is None else cards[names.index(wanted)]

    def _find_counter(self, chat: bool | None) -> str:
        """How tokens are counted, settling whether the model chats where nobody said."""
        if self._tokenizer is not None:
            if chat is None:
                self.chat = bool(self._tokenizer.chat_template)
            return "tokenizer"
        for self.chat in (True, False) if chat is None else (chat,):
            for counter in ("tokenize", "template"):
                if self._counted(counter, "one two three") is not None:
                    return counter
        raise LongctxError(
            f"{self.url} has no /tokenize, so exact lengths cannot be made: give --tokenizer FOLDER, the model's own"
        )

    def _counted(self, counter: str, prompt: str) -> int | None:
        messages = [{"role": "user", "content": prompt}]
        if counter == "tokenizer":
            if self.chat:
                text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
            return len(self._tokenizer(prompt)["input_ids"])
        if counter == "tokenize":  # this project's and vLLM's
            what = {"messages": messages} if self.chat else {"prompt": prompt}
            return self._token_count({"model": self.name, **what})
        if self.chat:  # llama.cpp's
            rendered = self._request("POST", "/apply-template", {"messages": messages})
            if rendered.status_code >= 400:
                return None
            prompt = str(_object(rendered).get("prompt"))
        return self._token_count({"content": prompt, "add_special": True})

    def _token_count(self, body: Mapping[str, Any]) -> int | None:
        response = self._request("POST", "/tokenize", body)
        if response.status_code >= 400:
            self._refusal = f"{response.status_code}: {_message(response)}"
            return UNCOUNTED if self._counter and response.status_code in _TOO_LONG else None
        found = _object(response)
        if isinstance(found.get("count"), int):
            return int(found["count"])
        return len(found["tokens"]) if isinstance(found.get("tokens"), list) else None

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            return self._http.request(method, f"{self.url}{path}", json=None if body is None else dict(body))
        except httpx.HTTPError as error:
            raise LongctxError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error


class _Refused(LongctxError):
    """The server answered with an error of its own."""


class _Reported:
    """A streamed response whose broken connection is an `EngineError` that names the server."""

    def __init__(self, response: Any, url: str):
        self._response, self._url = response, url

    def __enter__(self) -> httpx.Response:
        try:
            entered: httpx.Response = self._response.__enter__()
        except httpx.HTTPError as error:
            raise EngineError(f"{self._url} broke off: {error or type(error).__name__}") from error
        return entered

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._response.__exit__(kind, error, trace)
        if isinstance(error, httpx.HTTPError):
            raise EngineError(f"{self._url} broke off: {error or type(error).__name__}") from error


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The objects of a server-sent stream; raises `EngineError` for an error that comes after the head."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if chunk.get("error"):
            error = chunk["error"]
            raise EngineError(f"the server failed: {error.get('message', error) if isinstance(error, dict) else error}")
        yield chunk


def _object(response: httpx.Response) -> dict[str, Any]:
    with suppress(ValueError):
        found = response.json()
        if isinstance(found, dict):
            return found
    return {}


def _message(response: httpx.Response) -> str:
    error = _object(response).get("error")
    text = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(text or response.text).split())[:300]


def _load_tokenizer(folder: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions for corrupt files
        raise LongctxError(f"--tokenizer {folder} cannot be read: {' '.join(str(error).split())[:200]}") from error
