"""`Reach`: which positions a layer's queries see, and what of them must be held. Numbers only, without tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reach:
    """A query at i sees keys j <= i: all of them, or those with i - j < `window` or j < `sinks`, or those of its own
    multiple of `local_chunk`. The words are `AttnParams`'s.

    What slides out is never seen again: neither a window's first key nor a chunk's ever moves back.
    """

    window: int | None = None
    sinks: int = 0
    local_chunk: int | None = None

    @property
    def kind(self) -> str:
        """full, window, sinks (beside a window) or local_chunk."""
        if self.local_chunk is not None:
            return "local_chunk"
        if self.window is None:
            return "full"
        return "sinks" if self.sinks else "window"

    @property
    def most(self) -> int | None:
        """The most keys that one query sees; None if it is all before it."""
        return self.local_chunk if self.window is None else self.window + self.sinks

    def keys(self, context: float) -> float:
        """Keys that the last of `context` tokens sees, its own included; a mean over several may be fractional."""
        if self.local_chunk is not None:
            return (context - 1) % self.local_chunk + 1
        return context if self.most is None else min(context, self.most)

    def held(self, tokens: int) -> int:
        """The most keys of a request of `tokens` tokens that are needed at the same time."""
        return tokens if self.most is None else min(tokens, self.most)

    def first(self, position: int) -> int:
        """The first key that the query at `position` sees, sinks aside."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.local_chunk is None else position // self.local_chunk * self.local_chunk

    def first_block(self, tokens: int, block_tokens: int) -> int:
        """The first block, sinks aside, that the query at position `tokens`, or a later one, still sees.

        The blocks from here to position `tokens` and those of the sinks are both what a running request must hold and
        what a hit at `tokens` needs.
        """
        return self.first(tokens) // block_tokens

    def sink_blocks(self, block_tokens: int) -> int:
        """Blocks at the front that never slide out."""
        return -(-self.sinks // block_tokens)

    def tail_blocks(self, block_tokens: int) -> int:
        """Blocks before a block border, sinks aside, that a hit there reads at most. Not for full attention."""
        before = self.window or self.local_chunk
        assert before is not None
        return -(-(before - 1) // block_tokens)

    def blocks(self, chunk: int, block_tokens: int) -> int:
        """The most blocks of a chunk of tokens, what it sees before it and the sinks, wherever the chunk begins. Not
        for full attention."""
        before = self.window or self.local_chunk
        assert before is not None
        return -(-(before + chunk - 2) // block_tokens) + 1 + self.sink_blocks(block_tokens)
