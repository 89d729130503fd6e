"""`longctx bench`: speed and memory, each figure beside its share of the machine's limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from longctx.cli.options import (
    Attention,
    ChunkTokens,
    DType,
    KVFactors,
    KVFormat,
    KVMemory,
    LoadFormat,
    MaxModelLen,
    Weights,
)
from longctx.cli.out import new_file
from longctx.cli.progress import say, stderr_console
from longctx.cli.variant import LocalChunk, Sinks, Variant, Window, variant_options
from longctx.errors import EngineError, LongctxError
from longctx.units import parse_bytes, parse_tokens


def bench(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="limits, prefill, decode, kv-formats, prefix, mixed, multiturn, concurrency, replay, serve or needle",
        ),
    ],
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="built-in name, folder, .gguf file or hub id")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,...", help="prompt + generated tokens of each cell, such as 1K,8K,32K")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="N", help="decoded tokens of a cell; for prefix, those of a question")
    ] = None,
    repeats: Annotated[int, typer.Option(help="runs of each cell, of which the median counts")] = 3,
    against: Annotated[
        str | None,
        typer.Option(metavar="hf|URL", help="measure Hugging Face, or a server, on the same prompts, in turn"),
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="requests to replay, in Mooncake's JSONL form")
    ] = None,
    speedup: Annotated[float, typer.Option(help="replay a trace so many times as fast")] = 1.0,
    profile: Annotated[bool, typer.Option("--profile", help="also say where the time of a step goes")] = False,
    max_model_len: MaxModelLen = None,
    chunk_tokens: ChunkTokens = None,
    kv_format: KVFormat = "auto",
    kv_factors: KVFactors = None,
    attention: Attention = "auto",
    variant: Variant = "exact",
    window: Window = None,
    sinks: Sinks = None,
    local_chunk: LocalChunk = None,
    kv_memory: KVMemory = None,
    dtype: DType = "auto",
    weights: Weights = "auto",
    load_format: LoadFormat = "auto",
    out: Annotated[str | None, typer.Option(metavar="FILE", help="also write the JSON to a new file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Measure one thing on this machine: its limits before and after, each figure with its multiple of the floor.

    A run on a machine that was not quiet says so and is not valid. See docs/benchmarks for what each figure means.
    """
    target = None if out is None else new_file(out)
    options = {
        "max_model_len": None if max_model_len is None else parse_tokens(max_model_len, "--max-model-len"),
        "chunk_tokens": None if chunk_tokens is None else parse_tokens(chunk_tokens, "--chunk-tokens"),
        "kv_memory": None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory"),
        "kv_format": kv_format,
        "kv_factors": kv_factors,
        "attention": attention,
        "dtype": dtype,
        "weights": weights,
        "load_format": load_format,
        **variant_options(variant, window, sinks, local_chunk),
    }
    console = stderr_console()

    from longctx.evals.bench.job import Job
    from longctx.evals.bench.main import find_bench, run_bench
    from longctx.evals.bench.report import table_text

    found = find_bench(name)
    job = Job(
        model=model,
        lengths=None if lengths is None else tuple(parse_tokens(part, "--lengths") for part in lengths.split(",")),
        tokens=None if tokens is None else parse_tokens(tokens, "--tokens"),
        repeats=repeats,
        against=against,
        profile=profile,
        trace=trace,
        speedup=speedup,
        options={key: value for key, value in options.items() if value is not None},
        say=lambda line: say(console, line),
    )
    report = run_bench(found, job)
    text = json.dumps(report)
    if target is not None:
        _write(target, text)
    if as_json:
        print(text)
    else:
        print(table_text(report, found.columns))
    if report["failure"]:
        raise EngineError(report["failure"])


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x") as file:
            file.write(text + "\n")
    except OSError as error:
        raise LongctxError(f"--out {path} cannot be written: {error.strerror or error}") from error
