"""An OpenAI-compatible server as a peer: prompts as token ids, times as its client sees them."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from longctx.errors import EngineError, LongctxError

CONNECT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ReadThere:
    """A prompt that the server has read, and may have kept in its prefix cache."""

    ids: tuple[int, ...]
    ttft_s: float
    token: None = None


class URLPeer:
    """`/v1/completions` with token ids, streamed; `ignore_eos` as vLLM, SGLang, llama.cpp and longctx understand it.

    The server must hold the same model. Nothing else should use it, and it should idle while the engine is measured.
    """

    def __init__(self, url: str):
        self._base = url.rstrip("/").removesuffix("/v1")
        models = json.loads(self._open("/v1/models", None).read())["data"]
        if not models:
            raise LongctxError(f"{url} serves no model")
        self._model = models[0]["id"]

    def prefill(self, ids: Sequence[int]) -> ReadThere:
        """Read a prompt cold; raises `EngineError` if the server took any of it from its cache."""
        start_s = time.perf_counter()
        first_s: float | None = None
        usage: dict[str, Any] = {}
        for at_s, chunk in self._stream(ids, 1):
            if first_s is None and chunk.get("choices"):
                first_s = at_s
            usage = chunk.get("usage") or usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if cached:
            raise EngineError(f"the peer took {cached} of {len(ids)} tokens from its cache: its time is no prefill's")
        if first_s is None:
            raise EngineError(f"{self._base} ended a stream without a token")
        return ReadThere(tuple(ids), first_s - start_s)

    def decode(self, prompt: ReadThere, num_tokens: int) -> tuple[list[float], None]:
        """The mean step, `num_tokens` times: a server may send several tokens in one chunk or none for half a
        character."""
        times: list[float] = []
        usage: dict[str, Any] = {}
        for at_s, chunk in self._stream(prompt.ids, num_tokens + 1):
            if chunk.get("choices"):
                times.append(at_s)
            usage = chunk.get("usage") or usage
        tokens = usage.get("completion_tokens", len(times))
        if tokens < 2 or len(times) < 2:
            raise EngineError(f"{self._base} generated {tokens} tokens where {num_tokens + 1} were asked for")
        return [(times[-1] - times[0]) / (tokens - 1)] * num_tokens, None

    def _stream(self, ids: Sequence[int], max_tokens: int) -> Iterator[tuple[float, dict[str, Any]]]:
        body = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        with self._open("/v1/completions", body) as answer:
            for line in answer:
                if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                    continue
                chunk = json.loads(line[5:])
                if "error" in chunk:
                    raise EngineError(f"{self._base} failed: {chunk['error']}")
                yield time.perf_counter(), chunk

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise LongctxError(f"{self._base}{path} answers {error.code}: {error.read(2000).decode()}") from error
        except (OSError, ValueError) as error:
            raise LongctxError(f"{self._base}{path} cannot be reached: {error}") from error
