"""`longctx run`: one document, one or more questions on it, with a plan before and progress during."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longctx.cli.batch import BatchJob, run_batch
from longctx.cli.interrupt import cancelling_on_interrupt
from longctx.cli.options import (
    Attention,
    ChunkTokens,
    DeviceMemory,
    DType,
    KVFactors,
    KVFormat,
    KVMemory,
    LoadFormat,
    MaxModelLen,
    RopeScaling,
    Weights,
)
from longctx.cli.progress import JobProgress, LoadProgress, Meter, say, stderr_console
from longctx.cli.prompt import checked_text, read_prompt
from longctx.cli.report import Answer, json_report, plan_line, usage_line
from longctx.cli.variant import LocalChunk, Sinks, Variant, Window, variant_options
from longctx.config import EngineConfig
from longctx.errors import EngineError, LongctxError, RequestError
from longctx.events import ProgressEvent, TokenEvent, TokenLogprobs
from longctx.params import SamplingParams
from longctx.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from rich.console import Console

    from longctx.llm import LLM

DEFAULT_MAX_TOKENS = 256
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Job:
    """What one invocation asks for. `chat` None means by the model: its template, if it has one."""

    model: str
    document: str
    questions: tuple[str, ...]
    params: SamplingParams
    options: dict[str, Any]
    chat: bool | None
    as_json: bool


def run(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="built-in name, folder, .gguf file or hub id")],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="the prompt itself")] = None,
    prompt_file: Annotated[str | None, typer.Option(metavar="FILE", help="read it from a file; - is stdin")] = None,
    ask: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="a question put after the prompt; again for the next on the same prompt"),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="FILE", help="answer all requests of a file of OpenAI's batch lines")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="with --batch: where results go; one that is there goes on")
    ] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="use the chat template or not; by default if there is one")
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option(metavar="N", help=f"tokens to generate at most; {DEFAULT_MAX_TOKENS} if absent")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option(help="sample among the k likeliest; 0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="sample within this share of probability; 1 is off")] = 1.0,
    min_p: Annotated[float, typer.Option(help="leave out tokens below this share of the likeliest; 0 is off")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="against all tokens that came; 1 is off")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="against tokens that the answer has; 0 is off")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="the same for each time it has them; 0 is off")] = 0.0,
    logprobs: Annotated[
        int | None, typer.Option(metavar="N", help="with --json: each token's logprob, and the N likeliest instead")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="same seed, same answer; drawn and reported if absent")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="end before this text; repeatable")] = None,
    chunk_tokens: ChunkTokens = None,
    max_model_len: MaxModelLen = None,
    rope_scaling: RopeScaling = None,
    kv_format: KVFormat = "auto",
    kv_factors: KVFactors = None,
    attention: Attention = "auto",
    variant: Variant = "exact",
    window: Window = None,
    sinks: Sinks = None,
    local_chunk: LocalChunk = None,
    kv_memory: KVMemory = None,
    device_memory: DeviceMemory = None,
    memory_fraction: Annotated[float | None, typer.Option(help="the pool's share of what the rest leaves")] = None,
    dtype: DType = "auto",
    weights: Weights = "auto",
    load_format: LoadFormat = "auto",
    unverified_model: Annotated[bool, typer.Option("--unverified-model", help="allow other model types")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="the same bits whatever is cached")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Read a prompt of any length and answer: the text goes to stdout, all else to stderr.

    With --ask the prompt is a document that is read once: each question is put after it and only its own tokens are
    computed. Without a chat template it follows exactly as given, with nothing between. Ctrl-C ends the answer.

    With --batch every line of FILE is a request ({custom_id, method, url, body}) and gets a line of results, errors
    included. Started again with the same --out it skips what has a result.
    """
    if batch is not None:
        _check_batch(context, out, as_json)
    elif out is not None:
        raise LongctxError("--out is for the results of --batch: an answer goes to stdout")
    document = read_prompt(prompt, prompt_file) if batch is None else ""
    if logprobs is not None and not as_json and batch is None:
        raise LongctxError(f"--logprobs {logprobs} needs --json: there is no place for them in the text")
    params = SamplingParams(
        max_tokens=None if max_tokens is None else parse_tokens(max_tokens, "--max-tokens"),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logprobs=logprobs,
        seed=seed,
        stop=tuple(checked_text(text, "--stop") for text in stop or ()),
    )
    options = {
        "chunk_tokens": None if chunk_tokens is None else parse_tokens(chunk_tokens, "--chunk-tokens"),
        "max_model_len": None if max_model_len is None else parse_tokens(max_model_len, "--max-model-len"),
        "rope_scaling": rope_scaling,
        "kv_format": kv_format,
        "kv_factors": kv_factors,
        "attention": attention,
        "kv_memory": None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory"),
        "device_memory": None if device_memory is None else parse_bytes(device_memory, "--device-memory"),
        "memory_fraction": memory_fraction,
        "dtype": dtype,
        "weights": weights,
        "load_format": load_format,
        "unverified_model": unverified_model,
        "deterministic": deterministic,
        **variant_options(variant, window, sinks, local_chunk),
        # One question at a time: the pool need not hold the windows of more.
        **({"max_running": 1} if batch is None else {}),
    }
    # Refused now rather than after the seconds that loading takes.
    EngineConfig.from_options(model, **options)
    if batch is not None:
        finished = run_batch(BatchJob(model, batch, out, options, as_json), stderr_console())
        raise typer.Exit(0 if finished else EXIT_INTERRUPTED)
    job = Job(model, document, _questions(ask or ()), params, options, chat, as_json)
    raise typer.Exit(run_job(job, stderr_console()))


def run_job(job: Job, console: Console) -> int:
    """Load the model, answer every question, report; the exit code."""
    say(console, f"loading {job.model}")
    from longctx.llm import LLM

    with Meter(console) as meter:
        llm = LLM(job.model, progress=LoadProgress(meter), **job.options)
    with llm:
        prompts = [encode(llm, job, question) for question in job.questions or (None,)]
        all_params = [fill_max_tokens(llm, job.params, len(ids)) for ids in prompts]
        for ids, params in zip(prompts, all_params, strict=True):
            # A last question that is too long must not surface after an hour of reading for the first.
            llm.engine.make_request(ids, params)
        longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
        say(console, plan_line(llm, len(prompts[longest]), all_params[longest].max_tokens or 1))
        answers: list[Answer] = []
        for question, ids, params in zip(job.questions or (None,), prompts, all_params, strict=True):
            if question is not None:
                say(console, f"question {len(answers) + 1} of {len(job.questions)}: {question.strip()}")
            answers.append(answer(llm, question, ids, params, console, quiet=job.as_json))
            say(console, usage_line(answers[-1].end))
            if answers[-1].end.reason == "cancelled":
                break
        if job.as_json:
            print(json.dumps(json_report(llm, answers)))
    return EXIT_INTERRUPTED if answers[-1].end.reason == "cancelled" else 0


def encode(llm: LLM, job: Job, question: str | None) -> list[int]:
    """Token ids of the document with one question, through the chat template if the job or the model wants it."""
    has_template = llm.engine.loaded.chat_template is not None
    if job.chat and not has_template:
        raise RequestError(f"{job.model} has no chat template: leave out --chat")
    if has_template if job.chat is None else job.chat:
        content = job.document if question is None else f"{job.document}\n\n{question}"
        return llm.encode([{"role": "user", "content": content}])
    return llm.encode(job.document + (question or ""))


def fill_max_tokens(llm: LLM, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
    """The default length of an answer, cut to what model and memory leave: only a length that was given is refused."""
    if params.max_tokens is not None:
        return params
    room = llm.engine.partition.longest_request - num_prompt_tokens
    return replace(params, max_tokens=max(1, min(DEFAULT_MAX_TOKENS, room)))


def answer(
    llm: LLM, question: str | None, ids: Sequence[int], params: SamplingParams, console: Console, *, quiet: bool
) -> Answer:
    """Run one request to its end, showing progress, and its text as it comes unless `quiet`.

    Where the text itself is seen growing it is its own progress, and so it is where text and progress may end up in one
    file. Ctrl-C cancels; the answer then ends early.
    """
    subscription = llm.start(ids, params)
    request = subscription.request
    text_is_progress = not quiet and (sys.stdout.isatty() or not console.is_terminal)
    first_s, tokens, end = 0.0, 0, None
    logprobs: list[tuple[int, TokenLogprobs]] = []

    def cancel() -> None:
        request.cancelled = True

    with cancelling_on_interrupt(cancel), Meter(console) as meter:
        progress = JobProgress(meter)
        for event in subscription:
            if isinstance(event, ProgressEvent):
                progress.prefill(event)
            elif isinstance(event, TokenEvent):
                now_s = time.perf_counter()
                first_s, tokens = first_s or now_s, tokens + 1
                if text_is_progress:
                    meter.close()
                else:
                    progress.decode(tokens, params.max_tokens or 0, now_s - first_s)
                if event.logprobs is not None:
                    logprobs.append((event.token_id, event.logprobs))
                if not quiet:
                    print(event.text, end="", flush=True)
            else:
                end = event
    assert end is not None
    if end.reason == "error":
        raise EngineError(end.error)
    if not quiet:
        print(flush=True)
    return Answer(question, request.seed, end, None if params.logprobs is None else tuple(logprobs))


def _questions(texts: Sequence[str]) -> tuple[str, ...]:
    for number, text in enumerate(texts, start=1):
        if not checked_text(text, f"--ask number {number}"):
            raise LongctxError(f"--ask number {number} is empty: give at least one character")
    return tuple(texts)


_OF_ONE_PROMPT = (
    *("prompt", "prompt_file", "ask", "chat", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs"),
)


def _check_batch(context: typer.Context, out: str | None, as_json: bool) -> None:
    """Refuse what every request of a batch says for itself."""
    for name in _OF_ONE_PROMPT:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            flag = "--chat or --raw" if name == "chat" else f"--{name.replace('_', '-')}"
            raise LongctxError(f"{flag} and --batch do not go together: each request of the file has its own")
    if as_json and out is None:
        raise LongctxError("--json with --batch needs --out: without it the results are on stdout")
