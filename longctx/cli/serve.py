"""`longctx serve`: the HTTP server, its limits and who may use it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from longctx.cli.variant import LocalChunk, Sinks, Variant, Window, variant_options
from longctx.config import EngineConfig
from longctx.errors import LongctxError
from longctx.server.settings import ServerSettings
from longctx.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    import socket

KEYS_VARIABLE = "LONGCTX_API_KEYS"
MAX_KEY_FILE_BYTES = 2**20
MAX_KEY_CHARS = 512
MIN_KEY_CHARS = 8


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="built-in name, folder, .gguf file or hub id")],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="where to listen; 0.0.0.0 is everywhere")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="what clients call the model; MODEL's own name if absent")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a jinja chat template instead of the model's")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"one API key per line; {KEYS_VARIABLE} works too")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="a site whose pages may use the server; repeatable")
    ] = None,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="the largest request body")] = "64MiB",
    request_timeout: Annotated[
        str | None, typer.Option(metavar="SECONDS", help="the longest a request may take; jobs are exempt")
    ] = None,
    itl_target_ms: Annotated[float, typer.Option(help="answers keep this pace while prompts are read")] = 500.0,
    max_running: Annotated[int, typer.Option(help="requests computed at the same time")] = 8,
    max_queue: Annotated[int, typer.Option(help="requests that may wait; more are answered with 429")] = 1024,
    drain_seconds: Annotated[float, typer.Option(help="what running requests are given when the server stops")] = 30.0,
    jobs_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="where jobs are kept; by the port, in the cache, if absent")
    ] = None,
    job_ttl: Annotated[
        str, typer.Option(metavar="TIME", help="how long a job's result is kept, such as 7d, 12h")
    ] = "7d",
    max_jobs: Annotated[int, typer.Option(help="jobs kept at most")] = 1000,
    max_running_jobs: Annotated[int, typer.Option(help="jobs that run at the same time, beside other requests")] = 2,
    ping_seconds: Annotated[float, typer.Option(help="silence in a stream before a ping is sent")] = 10.0,
    log_format: Annotated[str, typer.Option(metavar="text|json", help="how the log is written")] = "text",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="write prompts to the log")] = False,
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
) -> None:
    """Serve a model over HTTP, as OpenAI's API and more.

    Ctrl-C or SIGTERM ends it in order: new requests are refused, those that run may end; a second one ends it at once.
    """
    config = EngineConfig.from_options(
        model,
        chunk_tokens=None if chunk_tokens is None else parse_tokens(chunk_tokens, "--chunk-tokens"),
        max_model_len=None if max_model_len is None else parse_tokens(max_model_len, "--max-model-len"),
        rope_scaling=rope_scaling,
        kv_format=kv_format,
        kv_factors=kv_factors,
        attention=attention,
        kv_memory=None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory"),
        device_memory=None if device_memory is None else parse_bytes(device_memory, "--device-memory"),
        memory_fraction=memory_fraction,
        dtype=dtype,
        weights=weights,
        load_format=load_format,
        unverified_model=unverified_model,
        deterministic=deterministic,
        **variant_options(variant, window, sinks, local_chunk),
        max_running=max_running,
        max_queue=max_queue,
        itl_target_s=itl_target_ms / 1e3,
    )
    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=read_keys(api_key_file, os.environ.get(KEYS_VARIABLE)),
        served_name=served_model_name or served_name(model),
        chat_template=None if chat_template is None else str(chat_template),
        cors_origins=tuple(check_origin(origin) for origin in cors_origin or ()),
        max_body_bytes=parse_bytes(max_body, "--max-body"),
        request_timeout_s=None if request_timeout is None else parse_seconds(request_timeout, "--request-timeout"),
        drain_s=drain_seconds,
        jobs_dir=jobs_dir,
        job_ttl_s=parse_seconds(job_ttl, "--job-ttl"),
        max_jobs=max_jobs,
        max_running_jobs=max_running_jobs,
        ping_s=ping_seconds,
        log_format=log_format,
        log_prompts=log_prompts,
    )
    run_server(settings, config)


def run_server(settings: ServerSettings, config: EngineConfig) -> None:
    """Check what can be checked before anything is loaded, listen, serve until a signal."""
    from longctx.models.cache import cache_root
    from longctx.models.sources import resolve
    from longctx.server import logs
    from longctx.server.address import listen

    resolve(config.load.model)
    if settings.chat_template is not None:
        from longctx.server.text_side import read_template

        # Its text, not its path: every process that needs it has the one that was checked here.
        settings = replace(settings, chat_template=read_template(settings.chat_template))
    with listen(settings.host, settings.port) as sock:
        port = sock.getsockname()[1]
        folder = cache_root() / "jobs" / str(port) if settings.jobs_dir is None else settings.jobs_dir.expanduser()
        logs.configure(settings.log_format)
        asyncio.run(_serve_on(sock, replace(settings, port=port, jobs_dir=folder), config))


async def _serve_on(sock: socket.socket, settings: ServerSettings, config: EngineConfig) -> None:
    """Start the engine's process, and import the rest of this one meanwhile: each takes its seconds."""
    from longctx.server.client import EngineClient

    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, this.cancel)
    client = EngineClient(config)
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(0)
    try:
        serve_on = await asyncio.to_thread(_import_server)
    except asyncio.CancelledError:
        # Ended by a signal before it began; from here on the server itself handles them.
        await client.stop()
        starting.cancel()
    else:
        await serve_on(settings, config, sock, client, starting)


def _import_server() -> Callable[..., Coroutine[Any, Any, None]]:
    from longctx.server.without_torch import keep_torch_out

    keep_torch_out()
    from longctx.server.listen import serve

    return serve


def served_name(model: str) -> str:
    """What clients call MODEL: a folder or a file by its own name, not by where it lies on this machine."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.is_file() else model


def read_keys(path: Path | None, variable: str | None) -> tuple[str, ...]:
    """The API keys of a file (one per line, # begins a comment) and of the environment (between commas or spaces).

    Raises `LongctxError`; no message shows a key.
    """
    keys = re.split(r"[,\s]+", variable.strip()) if variable and variable.strip() else []
    where = KEYS_VARIABLE
    if path is not None:
        where = f"--api-key-file {path}"
        try:
            with path.expanduser().open(encoding="utf-8") as file:
                text = file.read(MAX_KEY_FILE_BYTES + 1)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise LongctxError(f"{where} cannot be read: {reason}") from error
        if len(text) > MAX_KEY_FILE_BYTES:
            raise LongctxError(f"{where} is larger than {MAX_KEY_FILE_BYTES:,} bytes: it is no list of keys")
        lines = [line.strip() for line in text.splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            # Serving everybody is not what someone who names a file of keys wants.
            raise LongctxError(f"{where} has no key: write one per line")
        keys += found
    for key in keys:
        if not (MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable() and " " not in key):
            raise LongctxError(
                f"a key of {where} is not usable: it must have {MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable ASCII "
                "characters without spaces"
            )
    return tuple(dict.fromkeys(keys))


def check_origin(origin: str) -> str:
    """An origin as browsers send it, or * for all."""
    if origin != "*" and not re.fullmatch(r"https?://[^/?#\s]+", origin):
        raise LongctxError(f"--cors-origin {origin!r} is no origin: write https://example.org, without a path, or *")
    return origin.lower()


_TIME_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str, what: str) -> float:
    """Seconds of "90", "1.5s", "10m", "12h", "7d"; raises `LongctxError`."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*([a-z]*)", text.strip())
    unit = _TIME_UNITS.get(match[2]) if match else None
    if match is None or unit is None or not float(match[1]) > 0:
        raise LongctxError(f"{what} {text!r} is not understood: write 90, 10m, 12h or 7d")
    return float(match[1]) * unit
