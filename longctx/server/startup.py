"""The one table a server prints when it is ready: model, formats, memory plan, tiers, limits, access, endpoints."""

from __future__ import annotations

import ipaddress
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from longctx.config import SchedulerConfig
from longctx.server.logs import log_event
from longctx.server.messages import ModelInfo
from longctx.server.settings import ServerSettings
from longctx.units import format_bytes, format_seconds, format_tokens

log = logging.getLogger(__name__)

Row = tuple[str, str]
LABEL_WIDTH = 10
NO_API_KEY = "no API key"


def endpoints_of(schema: Mapping[str, Any]) -> list[str]:
    """What `app.openapi()` offers, in the order of the routes: "POST /v1/completions", "GET DELETE /v1/jobs/{id}"."""
    return [f"{' '.join(methods).upper()} {path}" for path, methods in schema["paths"].items()]


def table_rows(
    settings: ServerSettings,
    info: ModelInfo,
    scheduler: SchedulerConfig,
    endpoints: Sequence[str],
    *,
    start_seconds: float | None = None,
) -> list[Row]:
    """(label, text) of every line; a label may come with several lines."""
    rows = [("model", _model(info, start_seconds)), ("formats", _formats(info))]
    rows += [("formats", info.drift)] if info.drift is not None else []
    if info.attention != "exact":
        rows.append(("attention", info.attention))
    rows += [("memory", text) for text in _memory(info.plan)]
    rows += [("tiers", text) for text in _tiers(info)]
    rows += [("limits", _limits(settings, scheduler)), ("access", _access(settings))]
    if settings.jobs_dir is not None:
        kept = f"up to {settings.max_jobs:,}, kept {format_seconds(settings.job_ttl_s)}"
        rows.append(("jobs", f"in {settings.jobs_dir}, {kept}"))
    return rows + [("endpoints", text) for text in endpoints]


def start_table(url: str, model: str, rows: Sequence[Row]) -> str:
    """The table as text: a headline, then labels and values; a label is written once."""
    lines, before = [f"longctx serves {model} at {url}", ""], None
    for label, text in rows:
        shown = label if label != before else ""
        lines.append(f"  {shown:<{LABEL_WIDTH}} {text}")
        before = label
    return "\n".join(lines) + "\n"


def announce(
    url: str,
    settings: ServerSettings,
    info: ModelInfo,
    scheduler: SchedulerConfig,
    schema: Mapping[str, Any],
    *,
    start_seconds: float | None = None,
    stream: TextIO | None = None,
) -> None:
    """Say that the server is ready: the table on stderr, or one JSON record with the same facts. `schema` is the app's
    OpenAPI."""
    endpoints = endpoints_of(schema)
    if settings.log_format == "text":
        model = settings.served_name or info.model
        rows = table_rows(settings, info, scheduler, endpoints, start_seconds=start_seconds)
        print(f"\n{start_table(url, model, rows)}", file=stream if stream is not None else sys.stderr, flush=True)
    else:
        log_event(log, "ready", url=url, **facts(settings, info, scheduler, endpoints, start_seconds))


def facts(
    settings: ServerSettings,
    info: ModelInfo,
    scheduler: SchedulerConfig,
    endpoints: Sequence[str],
    start_seconds: float | None = None,
) -> dict[str, Any]:
    """What the table says, for programs. API keys are counted, never shown."""
    return {
        "model": info.model,
        "served_name": settings.served_name or info.model,
        "dtype": info.dtype,
        "weights": info.weights,
        "kv_format": info.kv_format,
        "drift": info.drift,
        "attention": info.attention,
        "block_tokens": info.block_tokens,
        "max_positions": info.max_positions,
        "longest_request": info.longest_request,
        "weight_bytes": info.weight_bytes,
        "workspace_bytes": info.workspace_bytes,
        "process_bytes": info.plan["process_bytes"],
        "pool_bytes": info.pool_bytes,
        "peak_bytes": info.plan["peak_bytes"],
        "tiers": {"g1": info.pool_bytes},
        "max_running": scheduler.max_running,
        "max_queue": scheduler.max_queue,
        "itl_target_s": scheduler.itl_target_s,
        "max_body_bytes": settings.max_body_bytes,
        "max_header_bytes": settings.max_header_bytes,
        "request_timeout_s": settings.request_timeout_s,
        "drain_s": settings.drain_s,
        "num_api_keys": len(settings.api_keys),
        "cors_origins": list(settings.cors_origins),
        "jobs_dir": None if settings.jobs_dir is None else str(settings.jobs_dir),
        "start_seconds": start_seconds,
        "endpoints": list(endpoints),
    }


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name other than localhost is not taken for granted."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _model(info: ModelInfo, start_seconds: float | None) -> str:
    text = f"{info.model}, {format_tokens(info.max_positions)} positions, vocabulary {info.vocab_size:,}, {info.dtype}"
    text += "" if info.weights == "plain" else f", weights in {info.weights}"
    return text if start_seconds is None else f"{text}, loaded in {format_seconds(start_seconds)}"


def _formats(info: ModelInfo) -> str:
    per_token = info.plan["bytes_per_token"] + info.plan["scale_bytes_per_token"]
    cost = f", {per_token:,} bytes per token" if per_token else ""
    return f"KV {info.kv_format} in blocks of {info.block_tokens:,} tokens{cost}"


def _memory(plan: dict[str, Any]) -> list[str]:
    parts = {"weights": "weight", "workspace": "workspace", "process": "process", "KV pool": "pool"}
    sizes = {name: plan[f"{key}_bytes"] for name, key in parts.items()}
    text = " + ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    lines = [f"{text} = {format_bytes(sum(sizes.values()))}"]
    if plan["peak_bytes"] > sum(sizes.values()):
        lines.append(f"peak {format_bytes(plan['peak_bytes'])}, while loading")
    return lines


def _tiers(info: ModelInfo) -> list[str]:
    longest, at_once = info.longest_request, info.plan["requests_that_fit"]
    text = f"g1 device {format_bytes(info.pool_bytes)}: requests of up to {format_tokens(longest)} tokens"
    if longest < info.max_positions:
        return [f"{text}, {info.max_positions - longest:,} fewer than the model has positions"]
    return [f"{text}, {at_once:,} of that length at a time" if at_once else text]


def _limits(settings: ServerSettings, scheduler: SchedulerConfig) -> str:
    limit_s = settings.request_timeout_s
    parts = [
        f"{scheduler.max_running:,} running, {scheduler.max_queue:,} queued",
        f"body {format_bytes(settings.max_body_bytes)}, headers {format_bytes(settings.max_header_bytes)}",
        "no time limit" if limit_s is None else f"{format_seconds(limit_s)} per request",
        f"tokens at most {format_seconds(scheduler.itl_target_s)} apart",
        f"{format_seconds(settings.drain_s)} to drain",
    ]
    return "; ".join(parts)


def _access(settings: ServerSettings) -> str:
    count, local = len(settings.api_keys), is_loopback(settings.host)
    if count:
        text = f"{count} API key{'s' if count > 1 else ''}"
    else:
        text = (
            f"{NO_API_KEY}, this machine only"
            if local
            else f"{NO_API_KEY}: anyone who reaches {settings.host} may use it"
        )
    origins = ", ".join(settings.cors_origins)
    return f"{text}; CORS {origins or 'off'}"
