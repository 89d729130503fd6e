"""What POST /v1/jobs is sent: which endpoint, its body, and how long the answer is kept."""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass
from typing import Any

from longctx.server.body import SPARE_VALUES, Limits, bad, check, parse_object
from longctx.server.json_pieces import dumps
from longctx.server.messages import ModelInfo
from longctx.server.prepare import check_lengths, prepare
from longctx.server.schema import JobRequest
from longctx.server.text_side import TextSide

ENDPOINTS = {"/v1/completions": "completions", "/v1/chat/completions": "chat", "/v1/responses": "responses"}
PATHS = {name: path for path, name in ENDPOINTS.items()}

STREAM_FIELDS = ("return_progress", "stream_options")
"""They need `stream`, which a job does not: its stream is there anyway."""

MAX_KEY_CHARS = 255
SEEDS = 2**53
"""Drawn seeds stay below what every JSON reader keeps exactly."""


@dataclass(frozen=True)
class Order:
    """A job body that was checked. `body` is what the endpoint gets, `digest` names all that the client asked."""

    endpoint: str
    body: bytes
    digest: bytes
    ttl_s: float | None
    idempotency_key: str | None
    warnings: tuple[str, ...] = ()


def take_order(raw: bytes | bytearray, text: TextSide, limits: Limits, info: ModelInfo) -> Order:
    """Read and check a job's body, its endpoint's part too, so that what can only fail is refused now: `ApiError`.

    Where a draw needs a seed and none is given, one is drawn here: every run of the job generates the same.
    """
    most = info.longest_request * limits.max_choices + SPARE_VALUES
    request = check(JobRequest, parse_object(raw, most))
    if request.model is not None:
        raise bad("the model belongs into the job's own body: {endpoint, body: {model, ...}}", "model")
    endpoint = ENDPOINTS.get(request.endpoint)
    if endpoint is None:
        raise bad(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
    key = check_key(request.idempotency_key, "idempotency_key")
    asked = json.dumps([endpoint, request.body, request.ttl_s], sort_keys=True)
    fields: dict[str, Any] = dict(request.body)
    if fields.get("seed") is None and fields.get("temperature") != 0:
        fields["seed"] = secrets.randbelow(SEEDS)
    if fields.get("stream", False) is False and any(fields.get(name) for name in STREAM_FIELDS):
        fields["stream"] = True
    body = dumps(fields).encode()
    prepared = prepare(endpoint, body, text, limits, info)
    check_lengths(prepared.works, info)  # the engine checks them only when the job begins, perhaps hours later
    digest = hashlib.sha256(asked.encode()).digest()
    return Order(endpoint, body, digest, request.ttl_s, key, prepared.options.warnings)


def check_key(key: str | None, name: str) -> str | None:
    """An idempotency key, from the body or from the header: any text of a sane length."""
    if key is not None and not 0 < len(key) <= MAX_KEY_CHARS:
        raise bad(f"{name} must have 1 to {MAX_KEY_CHARS} characters, got {len(key)}", name)
    return key
