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
    body_timeout_s: float = 30.0
    request_timeout_s: float | None = None
    drain_s: float = 30.0
    ping_s: float = 10.0
    max_choices: int = 64
    max_tracked: int = 256
    jobs_dir: Path | None = None
    max_jobs: int = 1000
    job_ttl_s: float = 7 * 86400.0
    log_prompts: bool = False
    log_format: str = "text"

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_header_bytes", "body_timeout_s", "ping_s", "max_choices", "max_jobs"):
            if not getattr(self, name) > 0:
                raise LongctxError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.port < 65536:
            raise LongctxError(f"port must be between 0 and 65535, got {self.port}")
        if self.log_format not in ("text", "json"):
            raise LongctxError(f"log_format must be text or json, got {self.log_format!r}")
