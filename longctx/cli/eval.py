"""`longctx eval`: whether a model, as this engine or a server runs it, finds and uses what stands in long prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longctx.cli.options import Attention, ChunkTokens, DType, KVFactors, KVMemory, LoadFormat, MaxModelLen, RopeScaling
from longctx.cli.progress import JobProgress, LoadProgress, Meter, say, stderr_console
from longctx.cli.variant import LocalChunk, Sinks, Variant, Window, variant_options
from longctx.errors import EngineError, LongctxError
from longctx.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from rich.console import Console

    from longctx.evals.target import Target
    from longctx.events import ProgressEvent

EXACT_FORMAT = "fp32"
"""What drift compares other formats with."""


def evaluate(
    name: Annotated[str, typer.Argument(metavar="NAME", help="the suite: niah, tasks or drift")],
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="as for run; with --url the served model's name")
    ] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="ask any OpenAI-compatible server instead")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="the server's key")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="counts tokens for a server that has no /tokenize")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,...", help="prompt + answer tokens of each cell, such as 4K,32K")
    ] = None,
    depths: Annotated[
        str | None, typer.Option(metavar="X,...", help="where needles go, from 0, the front, to 1, the end")
    ] = None,
    tasks: Annotated[str | None, typer.Option(metavar="NAME,...", help="kinds of question, or all")] = None,
    haystack: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="filler, code, docs, essays, package:NAME, a file or folder")
    ] = None,
    samples: Annotated[int, typer.Option(help="tries of each cell")] = 1,
    seed: Annotated[int, typer.Option(help="same seed, same questions")] = 0,
    max_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="the answer's room; by the task if absent")
    ] = None,
    warm: Annotated[bool, typer.Option("--warm", help="let cells share cached blocks; else each is read cold")] = False,
    control: Annotated[
        str, typer.Option(metavar="one|all|none", help="cells of each length that Hugging Face computes too")
    ] = "one",
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="use the chat template or not; by default if there is one")
    ] = None,
    max_model_len: MaxModelLen = None,
    rope_scaling: RopeScaling = None,
    chunk_tokens: ChunkTokens = None,
    kv_format: Annotated[
        list[str] | None, typer.Option(help="how the cache is stored; drift compares several: a,b or again")
    ] = None,
    kv_factors: KVFactors = None,
    weights: Annotated[
        str | None, typer.Option(metavar="auto|int8", help="how weights are kept; drift compares it with exact ones")
    ] = None,
    variant: Variant = "exact",
    window: Window = None,
    sinks: Sinks = None,
    local_chunk: LocalChunk = None,
    attention: Attention = "auto",
    kv_memory: KVMemory = None,
    dtype: DType = "auto",
    load_format: LoadFormat = "auto",
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="keep results there; goes on where an earlier run stopped")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Ask questions whose answers stand in the prompt, at exact lengths, and score them by string match.

    Controls tell a model's miss from an engine's: the question without its needle, and the same tokens through Hugging
    Face in float32. A folder of results is never overwritten.
    """
    options = {
        "max_model_len": None if max_model_len is None else parse_tokens(max_model_len, "--max-model-len"),
        "rope_scaling": rope_scaling,
        "chunk_tokens": None if chunk_tokens is None else parse_tokens(chunk_tokens, "--chunk-tokens"),
        "kv_memory": None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory"),
        "attention": attention,
        "dtype": dtype,
        "load_format": load_format,
        "kv_factors": kv_factors,
        **variant_options(variant, window, sinks, local_chunk),
    }
    cells = None if lengths is None else tuple(parse_tokens(part, "--lengths") for part in lengths.split(","))
    places = None if depths is None else tuple(_depth(part) for part in depths.split(","))
    formats, narrow = _formats(kv_format or ()), None if weights in (None, "auto") else weights
    room = None if max_tokens is None else parse_tokens(max_tokens, "--max-tokens")
    if url is None and model is None:
        raise LongctxError(f"eval {name} needs a MODEL, such as gemma3-270m, or the --url of a server")

    from longctx.evals.registry import find_suite
    from longctx.evals.report import table_text
    from longctx.evals.suite import EvalJob

    suite = find_suite(name)
    if suite.compares_formats:
        options["kv_format"] = EXACT_FORMAT
    elif len(formats) > 1:
        raise LongctxError(f"--kv-format {', '.join(formats)}: eval {name} takes one; eval drift compares several")
    else:
        options |= {"kv_format": formats[0] if formats else None, "weights": narrow}
    console = stderr_console()
    job = EvalJob(
        lengths=cells,
        depths=places,
        names=_names(tasks, suite.names),
        haystack=haystack,
        samples=samples,
        seed=seed,
        max_tokens=room,
        warm=warm,
        control=control,
        out=None if out is None else Path(out).expanduser(),
        kv_formats=tuple(formats),
        weights=narrow,
        say=lambda line: say(console, line),
    )
    with Meter(console) as meter:
        given = {key: value for key, value in options.items() if value not in (None, "auto")}
        opened = _server(url, model, api_key, chat, tokenizer) if url else _model(str(model), chat, given, meter)
        with opened as target:
            report = suite.run(job, target)
    if job.out is not None:
        _picture(report, job.out, console)
    print(json.dumps(report) if as_json else (suite.table or table_text)(report))
    if report["failure"]:
        raise EngineError(report["failure"])


def _depth(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise LongctxError(f"--depths {text!r} is no number: give some from 0 to 1, such as 0,0.5,1") from error


def _formats(texts: Sequence[str]) -> list[str]:
    """Every format named; plain names may share one option, a policy such as k:int8,v:int4 has one for itself."""
    return [part.strip() for text in texts for part in ([text] if ":" in text else text.split(","))]


def _names(text: str | None, known: Any) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(known) if text == "all" else tuple(part.strip() for part in text.split(","))


@contextmanager
def _model(name: str, chat: bool | None, options: dict[str, Any], meter: Meter) -> Iterator[Target]:
    from longctx import LLM
    from longctx.evals.target import LLMTarget

    def show(event: ProgressEvent) -> None:
        if event.stage == "queued":
            return
        progress = shown.get(event.request_id)
        if progress is None:
            shown.clear()
            progress = shown[event.request_id] = JobProgress(meter)
        progress.prefill(event)

    shown: dict[str, JobProgress] = {}
    with LLM(name, progress=LoadProgress(meter), max_running=1, **options) as llm:
        meter.close()
        yield LLMTarget(llm, name, chat, options, show)


@contextmanager
def _server(
    url: str, model: str | None, api_key: str | None, chat: bool | None, tokenizer: str | None
) -> Iterator[Target]:
    try:
        from longctx.evals.url_target import URLTarget
    except ModuleNotFoundError as error:
        raise LongctxError(f"--url needs the package {error.name}: pip install 'longctx-engine[evals]'") from error

    target = URLTarget(url, model, api_key=api_key, chat=chat, tokenizer=tokenizer)
    try:
        yield target
    finally:
        target.close()


def _picture(report: dict[str, Any], folder: Path, console: Console) -> None:
    path = folder / ("drift.png" if report["eval"] == "drift" else "heatmap.png")
    if path.exists():
        return
    try:
        from longctx.evals.drift_plot import write_drift
        from longctx.evals.heatmap import write_heatmap
    except ModuleNotFoundError as error:
        say(console, f"no {path.name}: it needs the package {error.name}, pip install 'longctx-engine[evals]'")
        return
    (write_drift if report["eval"] == "drift" else write_heatmap)(report, path)
