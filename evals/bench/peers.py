"""Who a benchmark measures beside this engine: Hugging Face in the same process, or any OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from longctx.evals.bench.peer_hf import HFPeer
from longctx.evals.bench.peer_url import URLPeer


class Read(Protocol):
    """A prompt that a peer has read: seconds to its first token, and that token where the peer names it."""

    @property
    def ttft_s(self) -> float: ...

    @property
    def token(self) -> int | None: ...


class Peer(Protocol):
    """Reads a prompt, then decodes behind it as often as asked."""

    def prefill(self, ids: Sequence[int]) -> Any:
        """Read a prompt that was never read before; answers a `Read`."""
        ...

    def decode(self, prompt: Any, num_tokens: int) -> tuple[list[float], list[int] | None]:
        """Seconds of each of `num_tokens` steps after the first token, and their tokens if known."""
        ...


def is_url(against: str | None) -> bool:
    return against is not None and against.startswith(("http://", "https://"))


def open_peer(against: str | None, engine: Any) -> Peer | None:
    """The peer of a job, ready to be measured."""
    if against is None:
        return None
    return URLPeer(against) if is_url(against) else HFPeer(engine)
