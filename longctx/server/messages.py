"""What the HTTP process and the engine process say to each other; everything pickles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longctx.events import Event
from longctx.params import SamplingParams

# -- to the engine ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submit:
    """Run one prompt. `token_ids` [n] int32; `request_id` is chosen by the sender and names it in every answer.

    `again`: an engine that died had accepted it, so that a full queue is no reason to refuse it now.
    """

    request_id: str
    token_ids: np.ndarray
    params: SamplingParams
    cache_salt: str | None = None
    again: bool = False


@dataclass(frozen=True)
class Cancel:
    """End a request between two layers; its `FinishEvent` follows."""

    request_id: str


@dataclass(frozen=True)
class Query:
    """Ask for something that is no request: `kind` is "plan" (arguments of `Engine.plan`)."""

    query_id: int
    kind: str
    args: dict[str, Any]


@dataclass(frozen=True)
class Stop:
    """Cancel what runs, save the measured rates, leave."""


ToEngine = Submit | Cancel | Query | Stop

# -- from the engine -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelInfo:
    """What the HTTP side must know of the loaded model. `folder` holds its tokenizer; `plan` is the engine's own plan
    as JSON for the longest request, `formats` what the cache stores."""

    model: str
    folder: str
    vocab_size: int
    max_positions: int
    longest_request: int
    dtype: str
    kv_format: str
    weight_bytes: int
    workspace_bytes: int
    pool_bytes: int
    block_tokens: int
    eos_token_ids: tuple[int, ...]
    plan: dict[str, Any]
    weights: str = "plain"
    attention: str = "exact"
    drift: str | None = None


@dataclass(frozen=True)
class Loading:
    """How far the model is: a stage's name, done and total in bytes."""

    stage: str
    done: float
    total: float


@dataclass(frozen=True)
class Ready:
    """The engine takes requests."""

    info: ModelInfo


@dataclass(frozen=True)
class Accepted:
    """A `Submit` was checked and queued; `seed` is the one its draws use."""

    request_id: str
    seed: int


@dataclass(frozen=True)
class Refused:
    """A `Submit` that was not queued, before any work. `code` is the error's own (`LongctxError.code`)."""

    request_id: str
    code: str
    message: str


@dataclass(frozen=True)
class Happened:
    """An event of a request."""

    event: Event


@dataclass(frozen=True)
class Answer:
    """The answer to a `Query`, or why there is none."""

    query_id: int
    value: Any = None
    code: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class EngineStats:
    """A snapshot, sent about twice a second while something runs and once when the engine goes idle.

    `kv` has per tier (g1, ...) the bytes `held` by running requests, `cached` for later ones, and the `cap`.
    `counters` only grow within one engine process: steps, prefill_tokens, decode_tokens, cached_tokens_g1,
    missed_tokens, preemptions, cancels, finished; later cached_tokens_g2 ... and decisions_load, decisions_recompute.
    `engine` is the engine's process id: another one means that the counters began again.
    """

    running: int
    waiting: int
    kv: dict[str, dict[str, int]]
    counters: dict[str, int] = field(default_factory=dict)
    engine: int = 0


@dataclass(frozen=True)
class Broken:
    """The engine could not start, or its loop ended; the process leaves after this. `user_error`: a restart would end
    the same way (a missing model, memory that does not suffice)."""

    message: str
    user_error: bool = False


FromEngine = Loading | Ready | Accepted | Refused | Happened | Answer | EngineStats | Broken
