"""What is done with the text of bodies, by name: prepare, tokenize, plan, ...; here or in another process."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from longctx.errors import LongctxError
from longctx.server.body import Limits, bad, read_body
from longctx.server.conversation import read_messages, read_tools
from longctx.server.job_body import take_order
from longctx.server.messages import ModelInfo
from longctx.server.prepare import prepare, prompts_of, token_ids
from longctx.server.schema import MAX_COUNT, DetokenizeRequest, PlanRequest, TokenizeRequest
from longctx.server.text_side import TextSide
from longctx.units import parse_tokens

_IDS_AT_ONCE = 4096


def perform(task: str, body: bytes | bytearray, text: TextSide, limits: Limits, info: ModelInfo) -> Any:
    """Do one of `TASKS` with a body. Raises `ApiError`."""
    return TASKS[task](body, text, limits, info)


def tokenize(body: bytes | bytearray, text: TextSide, limits: Limits, info: ModelInfo) -> bytes:
    """The JSON answer of /tokenize."""
    request, warnings = read_body(TokenizeRequest, body, limits, info)
    if (request.prompt is None) == (request.messages is None):
        raise bad("send either prompt or messages", "prompt")
    if request.messages is not None:
        ids = text.encode_chat(
            read_messages(request.messages, text.traits, warnings),
            tools=read_tools(request.tools, None, text.traits),
            add_generation_prompt=request.add_generation_prompt,
        )
    else:
        assert request.prompt is not None
        ids = text.encode(request.prompt, add_special_tokens=request.add_special_tokens)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_positions}
    if request.return_token_strs:
        answer["token_strs"] = text.spellings(ids)
    if warnings:
        answer["warnings"] = warnings
    # The ids last and by themselves: an array of numbers is written faster than a list of objects.
    head = json.dumps(answer, ensure_ascii=False)[:-1]
    return f'{head}, "tokens": [{_numbers(ids)}]}}'.encode()


def detokenize(body: bytes | bytearray, text: TextSide, limits: Limits, info: ModelInfo) -> bytes:
    """The JSON answer of /detokenize."""
    request, _ = read_body(DetokenizeRequest, body, limits, info)
    return json.dumps({"prompt": text.decode(token_ids(request.tokens, info, "tokens"))}, ensure_ascii=False).encode()


def plan(body: bytes | bytearray, text: TextSide, limits: Limits, info: ModelInfo) -> tuple[int, int]:
    """What /v1/plan asks about: tokens of prompt and answer together, and how many such requests at once."""
    request, warnings = read_body(PlanRequest, body, limits, info)
    given = [name for name in ("tokens", "prompt", "messages") if getattr(request, name) is not None]
    if len(given) != 1:
        raise bad("send one of tokens (prompt and answer together), prompt, messages", given[0] if given else "tokens")
    if request.tokens is not None:
        if "max_tokens" in request.model_fields_set:
            raise bad("tokens counts the answer too: leave max_tokens out", "max_tokens")
        return _count(request.tokens), request.concurrency
    if request.messages is not None:
        ids = text.encode_chat(read_messages(request.messages, text.traits, warnings))
    else:
        [ids, *more] = [
            text.encode(p) if isinstance(p, str) else token_ids(p, info, "prompt") for p in prompts_of(request.prompt)
        ]
        if more:
            raise bad("send one prompt", "prompt")
    return len(ids) + request.max_tokens, request.concurrency


def _count(tokens: Any) -> int:
    if isinstance(tokens, bool) or not isinstance(tokens, str | int):
        raise bad("tokens should be a whole number or text such as 128K", "tokens")
    try:
        count = parse_tokens(tokens[:64] if isinstance(tokens, str) else tokens, "tokens")
    except LongctxError as error:
        raise bad(str(error)[:300], "tokens") from None
    if not 1 <= count <= MAX_COUNT:
        raise bad(f"tokens should be between 1 and {MAX_COUNT}", "tokens")
    return count


def _numbers(ids: np.ndarray) -> str:
    return ", ".join(", ".join(map(str, ids[i : i + _IDS_AT_ONCE].tolist())) for i in range(0, len(ids), _IDS_AT_ONCE))


TASKS: dict[str, Callable[[bytes | bytearray, TextSide, Limits, ModelInfo], Any]] = {
    "completions": partial(prepare, "completions"),
    "chat": partial(prepare, "chat"),
    "responses": partial(prepare, "responses"),
    "tokenize": tokenize,
    "detokenize": detokenize,
    "plan": plan,
    "job": take_order,
}
