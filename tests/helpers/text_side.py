"""The text side of a model that does not exist: a small byte-level tokenizer, a template, made-up limits."""

from __future__ import annotations

import copy
import json
from typing import Any

from longctx.server.messages import ModelInfo
from longctx.server.prepare import prepare
from longctx.server.settings import ServerSettings
from longctx.server.text_side import TextSide
from longctx.server.work import Prepared
from tests.helpers.tokenizers import byte_level_tokenizer

CHAT = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def make_info(**changes: Any) -> ModelInfo:
    fields: dict[str, Any] = {
        "model": "tiny",
        "folder": "",
        "vocab_size": 301,
        "max_positions": 4096,
        "longest_request": 4096,
        "dtype": "float32",
        "kv_format": "auto",
        "weight_bytes": 0,
        "workspace_bytes": 0,
        "pool_bytes": 0,
        "block_tokens": 16,
        "eos_token_ids": (1,),
        "plan": {},
    }
    return ModelInfo(**{**fields, **changes})


def make_text(template: str | None = CHAT, longest: int = 4096, **options: Any) -> TextSide:
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.chat_template = template
    return TextSide(tokenizer, longest, **options)


def prepare_body(
    endpoint: str,
    body: bytes | dict[str, Any],
    text: TextSide | None = None,
    settings: ServerSettings | None = None,
    info: ModelInfo | None = None,
) -> Prepared:
    """`prepare` with all that a test does not care about filled in."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return prepare(endpoint, raw, text or make_text(), settings or ServerSettings(), info or make_info())
