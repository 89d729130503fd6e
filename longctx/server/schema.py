"""The bodies of the endpoints: every field with its type and range, as OpenAI has them, plus our own."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from longctx.params import MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOP_STRINGS

MAX_TIMEOUT_S = 7 * 86400.0
MAX_COUNT = 2**40
"""Of tokens: more than any model has, and few enough to calculate with."""


def _either(*schemas: dict[str, Any]) -> WithJsonSchema:
    """A field of several shapes, which `prepare` looks at itself: a union's errors would be as long as the input."""
    return WithJsonSchema({"anyOf": list(schemas)})


_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PARTS = {
    "type": "array",
    "items": {"type": "object", "properties": {"type": _TEXT, "text": _TEXT}, "required": ["type"]},
}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}

Prompt = Annotated[
    Any,
    _either(_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}, _IDS, {"type": "array", "items": _IDS}),
]
Stop = Annotated[Any, _either(_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}, {"type": "null"})]
Messages = Annotated[
    list[Any],
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"role": _TEXT, "content": {"anyOf": [_TEXT, _PARTS]}},
                "required": ["role", "content"],
            },
        }
    ),
]
Choice = Annotated[Any, _either(_TEXT, {"type": "object"})]
Loose = Annotated[dict[str, Any], WithJsonSchema({"type": "object"})]


class Body(BaseModel):
    """Types are not converted into each other, as OpenAI does not; null stands for an absent field.

    `unused` are OpenAI's fields without effect here, and why: an answer to a request that sets one says so. Others that
    change no answer (`user`, `metadata`) are taken without a word.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unused: ClassVar[dict[str, str]] = {}

    model: str | None = Field(None, description="the served model's name; may be left out")


class Generation(Body):
    """What every generating endpoint takes."""

    unused: ClassVar[dict[str, str]] = {
        "prompt_cache_key": "every prompt's beginning is looked for in the cache; cache_salt keeps caches apart",
        "service_tier": "there is one tier of service",
        "store": "answers are not stored; /v1/jobs keeps a job's result",
    }

    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, description="0 is greedy; default 1")
    top_p: float | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: Loose | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    # Not OpenAI's.
    top_k: int | None = Field(None, ge=0, lt=2**31, description="0 is off")
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    ignore_eos: bool = False
    cache_salt: str | None = Field(None, max_length=1024, description="keeps this request's cache apart from others'")
    return_progress: bool = Field(False, description="stream prompt_progress objects while the prompt is read")
    timeout_s: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S, description="deadline from the request's arrival on")


class StreamOptions(BaseModel):
    """`include_obfuscation` pads OpenAI's chunks against listeners to encrypted traffic; here it has no effect."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class _Choices(Generation):
    """What completions and chat share."""

    n: int = Field(1, ge=1)
    stop: Stop = None
    max_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Loose | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class CompletionRequest(_Choices):
    """POST /v1/completions."""

    prompt: Prompt
    best_of: int | None = Field(None, ge=1)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: str | None = None


class ChatRequest(_Choices):
    """POST /v1/chat/completions."""

    unused: ClassVar[dict[str, str]] = {
        **Generation.unused,
        "prediction": "answers are not predicted from a given text",
        "verbosity": "ask for it in a message",
        "web_search_options": "nothing is searched",
    }

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Loose] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    functions: list[Loose] | None = None
    function_call: Choice = None
    response_format: Loose | None = None
    modalities: list[str] | None = None
    audio: Loose | None = None
    prediction: Loose | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Loose | None = None
    # Not OpenAI's.
    chat_template_kwargs: Loose | None = Field(None, description="variables of the model's template")
    continue_final_message: bool = Field(False, description="the answer goes on with the last message's text")


class ResponsesRequest(Generation):
    """POST /v1/responses, the subset that agents use: the whole conversation in every request."""

    input: Annotated[Any, _either(_TEXT, {"type": "array", "items": {"type": "object"}, "minItems": 1})]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    tools: list[Loose] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: Loose | None = None
    truncation: str | None = None
    reasoning: Loose | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Choice = None
    prompt: Loose | None = None


class TokenizeRequest(Body):
    """POST /tokenize: the ids of a text, or of messages through the model's template."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: list[Loose] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """POST /detokenize: the text of ids, special tokens spelled out."""

    tokens: Annotated[list[Any], WithJsonSchema(_IDS)]


class PlanRequest(Body):
    """POST /v1/plan: what a prompt, or a number of tokens ("128K"), would need and take, answer included."""

    tokens: Annotated[Any, _either({"type": "integer", "minimum": 1}, _TEXT)] = None
    prompt: Annotated[Any, _either(_TEXT, _IDS)] = None
    messages: Messages | None = None
    max_tokens: int = Field(1, ge=1, le=MAX_COUNT)
    concurrency: int = Field(1, ge=1, le=1_000_000)


class JobRequest(Body):
    """POST /v1/jobs: a body for another endpoint, run whether or not its sender waits."""

    endpoint: str = Field(description="/v1/completions, /v1/chat/completions or /v1/responses")
    body: Loose
    ttl_s: float | None = Field(None, gt=0, description="how long the result is kept")
    idempotency_key: str | None = Field(None, description="the same key and body again is the same job")


REQUESTS: dict[str, type[Body]] = {
    "completions": CompletionRequest,
    "chat": ChatRequest,
    "responses": ResponsesRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
    "plan": PlanRequest,
    "jobs": JobRequest,
}
