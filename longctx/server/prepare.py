"""A body becomes work: checked, put through the model's template, tokenized, its sampling options mapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from longctx.errors import RequestError
from longctx.params import MAX_BIASED_TOKENS, MAX_STOP_STRINGS, SamplingParams
from longctx.server.body import Limits, bad, kind_of, read_body, served_name
from longctx.server.conversation import read_messages, read_template_options, read_tools, tool_names
from longctx.server.messages import ModelInfo
from longctx.server.responses_input import check_format, check_text_format, messages_of, repeated, wants_logprobs
from longctx.server.schema import ChatRequest, CompletionRequest, Generation, ResponsesRequest
from longctx.server.text_side import TextSide, clip, too_long
from longctx.server.work import Prepared, ReplyOptions, Work

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, for completions without max_tokens; chats go on to the model's limit."""


def prepare(
    endpoint: str, body: bytes | bytearray | memoryview, text: TextSide, limits: Limits, info: ModelInfo
) -> Prepared:
    """The work of a body for "completions", "chat" or "responses". Raises `ApiError` for all that cannot be served."""
    return _PREPARE[endpoint](body, text, limits, info)


def _completions(body: Any, text: TextSide, limits: Limits, info: ModelInfo) -> Prepared:
    request, warnings = read_body(CompletionRequest, body, limits, info)
    _check_common(request, warnings)
    if request.best_of is not None and request.best_of != request.n:
        raise bad("best_of must equal n: answers are not ranked here", "best_of", "unsupported_value")
    if request.suffix:
        raise bad("suffix is not supported: this model continues a prompt, it fills no gaps", "suffix")
    prompts = prompts_of(request.prompt)
    _check_choices(len(prompts), request.n, limits)
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is None and request.echo:
        prompt_logprobs = request.logprobs
    options = _sampling(request, info, warnings)
    options.update(
        max_tokens=DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    params = _params(options)
    encoded = [_encode(prompt, text, info) for prompt in prompts]
    echo = None
    if request.echo:
        echo = tuple(p if isinstance(p, str) else text.decode(ids) for p, ids in zip(prompts, encoded, strict=True))
    works = _works(encoded, params, request.n)
    if len(prompts) > 1:
        check_lengths(works, info)  # before the first of them is computed in vain
    return Prepared(
        "completions",
        works,
        _reply(request, limits, info, warnings, n=request.n, echo=echo, params=params),
    )


def _chat(body: Any, text: TextSide, limits: Limits, info: ModelInfo) -> Prepared:
    request, warnings = read_body(ChatRequest, body, limits, info)
    _check_common(request, warnings)
    _check_chat(request)
    _check_choices(1, request.n, limits)
    options = _sampling(request, info, warnings)
    options["max_tokens"] = request.max_tokens if request.max_tokens is not None else request.max_completion_tokens
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0
    options["prompt_logprobs"] = request.prompt_logprobs
    params = _params(options)
    messages = read_messages(request.messages, text.traits, warnings)
    tools = read_tools(request.tools, request.tool_choice, text.traits)
    variables = read_template_options(request.chat_template_kwargs or {}, text.traits, warnings)
    _effort(request.reasoning_effort, "reasoning_effort", text, variables, warnings)
    if request.continue_final_message and messages[-1]["role"] != "assistant":
        raise bad("continue_final_message needs a last message of the role assistant", "continue_final_message")
    ids = text.encode_chat(
        messages,
        tools=tools,
        add_generation_prompt=not request.continue_final_message,
        continue_final_message=request.continue_final_message,
        **variables,
    )
    reply = _reply(request, limits, info, warnings, n=request.n, params=params, tools=tool_names(tools))
    return Prepared("chat", _works([ids], params, request.n), reply)


def _responses(body: Any, text: TextSide, limits: Limits, info: ModelInfo) -> Prepared:
    request, warnings = read_body(ResponsesRequest, body, limits, info)
    _check_common(request, warnings)
    check_text_format(request)
    options = _sampling(request, info, warnings)
    options.update(max_tokens=request.max_output_tokens, logprobs=wants_logprobs(request))
    params = _params(options)
    items, names = messages_of(request)
    messages = read_messages(items, text.traits, warnings, names)
    tools = read_tools(request.tools, request.tool_choice, text.traits)
    if request.truncation == "auto":
        warnings.append("truncation auto has no effect: a conversation that is too long is an error, never cut")
    variables: dict[str, Any] = {}
    _effort((request.reasoning or {}).get("effort"), "reasoning.effort", text, variables, warnings)
    ids = text.encode_chat(messages, param="input", tools=tools, **variables)
    reply = _reply(
        request, limits, info, warnings, n=1, params=params, tools=tool_names(tools), extra=repeated(request)
    )
    return Prepared("responses", _works([ids], params, 1), reply)


_PREPARE: dict[str, Callable[[Any, TextSide, Limits, ModelInfo], Prepared]] = {
    "completions": _completions,
    "chat": _chat,
    "responses": _responses,
}


# -- checks ----------------------------------------------------------------------------------------------------------


def check_lengths(works: Sequence[Work], info: ModelInfo) -> None:
    """Raise the `ApiError` of the first work that is too long: what the engine checks when it is sent one."""
    longest = info.longest_request
    for work in works:
        num_prompt_tokens, max_tokens = len(work.token_ids), work.params.max_tokens or 1
        if (total := num_prompt_tokens + max_tokens) > longest:
            raise bad(
                f"prompt of {num_prompt_tokens:,} + max_tokens {max_tokens:,} = {total:,} tokens, the longest request "
                f"that this server takes has {longest:,}: set max_tokens to at most {longest - num_prompt_tokens:,}",
                "max_tokens",
                "context_length_exceeded",
            )


def _check_common(request: Generation, warnings: list[str]) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad("the stream_options parameter is only allowed when stream is enabled", "stream_options")
    if request.return_progress and not request.stream:
        warnings.append("return_progress has no effect without stream")
    if request.temperature == 0:
        neutral = {"top_p": (None, 1.0), "top_k": (None, 0), "min_p": (None, 0.0), "seed": (None,)}
        idle = [name for name, values in neutral.items() if getattr(request, name) not in values]
        if idle:
            warnings.append(f"{', '.join(idle)}: no effect at temperature 0")


def _check_chat(request: ChatRequest) -> None:
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise bad("send max_completion_tokens or max_tokens, not both", "max_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise bad("top_logprobs needs logprobs to be true", "top_logprobs")
    if request.functions or request.function_call not in (None, "none", "auto"):
        raise bad("functions are not supported: send them as tools", "functions", "unsupported_parameter")
    if request.audio is not None or set(request.modalities or ()) - {"text"}:
        raise bad("this server answers in text only", "modalities", "unsupported_parameter")
    check_format(request.response_format, "response_format")


def _check_choices(prompts: int, n: int, limits: Limits) -> None:
    if prompts * n > limits.max_choices:
        raise bad(
            f"{prompts:,} prompts with {n:,} answers each are more than the {limits.max_choices} choices of one "
            "request: send several requests",
            "n" if n > 1 else "prompt",
        )


def _effort(effort: Any, param: str, text: TextSide, variables: dict[str, Any], warnings: list[str]) -> None:
    """An effort is a variable of the templates that know one (gpt-oss), and nothing else here."""
    if effort is None:
        return
    if not isinstance(effort, str):
        raise bad(f"{param} should be a string, got {kind_of(effort)}", param)
    if "reasoning_effort" in text.traits.variables:
        variables.setdefault("reasoning_effort", effort)
    else:
        warnings.append(f"{param} has no effect: this model's template does not know it")


# -- prompts ---------------------------------------------------------------------------------------------------------


def prompts_of(prompt: Any) -> list[str | list[Any]]:
    """One prompt or several, each text or ids; whether ids are ids is checked when they become numbers."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise bad(f"prompt should be text, token ids or a list of either, got {kind_of(prompt)}", "prompt")
    if not prompt:
        raise bad("prompt is an empty list: give at least one prompt", "prompt")
    first = type(prompt[0])
    if first is int:
        return [prompt]
    if first not in (str, list) or any(type(item) is not first for item in prompt):
        raise bad("prompt should be text, token ids, a list of texts or a list of lists of token ids", "prompt")
    return list(prompt)


def _encode(prompt: str | list[Any], text: TextSide, info: ModelInfo) -> np.ndarray:
    ids = text.encode(prompt) if isinstance(prompt, str) else token_ids(prompt, info, "prompt")
    if not len(ids):
        raise bad("the prompt is empty: give at least 1 token", "prompt")
    return ids


def token_ids(values: Sequence[Any], info: ModelInfo, param: str) -> np.ndarray:
    """Ids of the model's vocabulary [n] int32. Raises `ApiError` for anything else, and for more than any request."""
    if len(values) >= info.longest_request:
        raise too_long(len(values), info.longest_request, param)
    if set(map(type, values)) - {int}:
        raise bad(f"{param} should be a flat list of whole numbers, the token ids", param)
    outside = [value for value in (min(values), max(values)) if not 0 <= value < info.vocab_size] if values else []
    if outside:
        got = clip(str(outside[0]), 32) if abs(outside[0]) < 10**30 else "a huge number"
        raise bad(f"token id {got} is outside the model's vocabulary of {info.vocab_size}", param)
    return np.array(values, dtype=np.int32)


# -- options ---------------------------------------------------------------------------------------------------------

_SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "ignore_eos"),
)


def _sampling(request: Generation, info: ModelInfo, warnings: list[str]) -> dict[str, Any]:
    """The options that endpoints share, by `SamplingParams`' names; without a temperature it is 1, as OpenAI has it."""
    options = {name: value for name in _SAME_NAME if (value := getattr(request, name, None)) is not None}
    options.setdefault("temperature", 1.0)
    if "seed" in options:
        options["seed"] %= 2**64  # OpenAI's seeds are signed
    if (stop := getattr(request, "stop", None)) is not None:
        options["stop"] = _stop(stop)
    if bias := getattr(request, "logit_bias", None):
        options["logit_bias"] = _bias(bias, info)
    return options


def _stop(stop: Any) -> tuple[str, ...]:
    if not isinstance(stop, str | list):
        raise bad(f"stop should be a string or a list of strings, got {kind_of(stop)}", "stop")
    if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
        raise bad(f"at most {MAX_STOP_STRINGS} stop strings, got {len(stop):,}", "stop")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(item, str) for item in strings):
        raise bad("stop should be a string or a list of strings", "stop")
    return strings


def _bias(bias: dict[str, Any], info: ModelInfo) -> dict[int, float]:
    if len(bias) > MAX_BIASED_TOKENS:
        raise bad(f"logit_bias can name at most {MAX_BIASED_TOKENS} tokens, got {len(bias):,}", "logit_bias")
    read = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < info.vocab_size):
            raise bad(f"logit_bias: {clip(key, 32)!r} is no token id below {info.vocab_size}", "logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad(f"logit_bias should have numbers as its values, got {kind_of(value)}", "logit_bias")
        read[int(key)] = value
    return read


def _params(options: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**options)
    except RequestError as error:
        name = str(error).split(" ", 1)[0].rstrip(":")
        raise bad(clip(str(error), 300), name if name in options else None, error.code) from error


def _works(encoded: Sequence[np.ndarray], params: SamplingParams, n: int) -> tuple[Work, ...]:
    """Choices in OpenAI's order, all of a prompt together; a seed gives each answer of a prompt its own draws."""
    each = [params if params.seed is None or not k else _reseeded(params, k) for k in range(n)]
    return tuple(Work(ids, each[k], i * n + k) for i, ids in enumerate(encoded) for k in range(n))


def _reseeded(params: SamplingParams, k: int) -> SamplingParams:
    assert params.seed is not None
    return SamplingParams(**{**vars(params), "seed": (params.seed + k) % 2**64})


def _reply(
    request: Generation, limits: Limits, info: ModelInfo, warnings: Sequence[str], *, params: SamplingParams, **own: Any
) -> ReplyOptions:
    if request.stream and params.prompt_logprobs is not None:
        raise bad(
            "the logprobs of a prompt come with a whole answer: leave out stream, or do not ask for them", "stream"
        )
    stream_options = request.stream_options
    return ReplyOptions(
        model=served_name(limits, info),
        stream=request.stream,
        include_usage=stream_options is not None and stream_options.include_usage,
        return_progress=request.return_progress and request.stream,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        cache_salt=request.cache_salt,
        timeout_s=request.timeout_s,
        warnings=tuple(warnings),
        **own,
    )
