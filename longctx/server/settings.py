"""Every setting of the HTTP side, frozen; the engine's own are in `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from longctx.errors import LongctxError


@dataclass(frozen=True)
class ServerSettings:
    """Where the server listens, who may use it, and its limits (bytes, seconds, counts)."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_name: str | None = None
    chat_template: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 64 * 2**20
    max_header_bytes: int = 32 * 2**10
    head_timeout_s: float = 20.0
    body_timeout_s: float = 30.0
    keep_alive_s: int = 30
    request_timeout_s: float | None = None
    drain_s: float = 30.0
    ping_s: float = 10.0
    max_choices: int = 64
    max_tracked: int = 256
    jobs_dir: Path | None = None
    max_jobs: int = 1000
    max_running_jobs: int = 2
    job_ttl_s: float = 7 * 86400.0
    log_prompts: bool = False
    log_format: str = "text"

    def __post_init__(self) -> None:
        positive = ("max_body_bytes", "max_header_bytes", "head_timeout_s", "body_timeout_s", "keep_alive_s", "ping_s")
        for name in (*positive, "max_choices", "max_tracked", "max_jobs", "max_running_jobs", "job_ttl_s"):
            if not getattr(self, name) > 0:
                raise LongctxError(f"{name} must be positive, got {getattr(self, name)}")
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise LongctxError(f"request_timeout_s must be positive, got {self.request_timeout_s}")
        if not 0 <= self.drain_s < float("inf"):
            raise LongctxError(f"drain_s must be 0 or more, got {self.drain_s}")
        if not 0 <= self.port < 65536:
            raise LongctxError(f"port must be between 0 and 65535, got {self.port}")
        if self.log_format not in ("text", "json"):
            raise LongctxError(f"log_format must be text or json, got {self.log_format!r}")
