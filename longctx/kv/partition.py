"""The static partition of the device's KV memory between layer groups, and the one test of what fits into it."""

# Legend: B tokens per block, W a window, R running requests.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longctx.attention.reach import Reach
from longctx.errors import ContextLengthError, DoesNotFitError, LongctxError, RequestError
from longctx.kv.groups import LayerGroup
from longctx.units import format_bytes

TAIL_EVERY = 8192
NULL_BLOCKS = 1
STAGING_BLOCKS = 1
"""One block that a partial hit or an incoming copy can be written to while its source is still held."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class PoolShape:
    """What decides how many blocks a pool needs besides the tokens: the groups and the limits of a running engine.

    `max_chunk_tokens` is the most tokens of one request in one step, `max_model_len` the longest request,
    `tail_every` the distance of permanent window tails.
    """

    groups: tuple[LayerGroup, ...]
    max_running: int
    max_chunk_tokens: int
    max_model_len: int
    tail_every: int = TAIL_EVERY

    def __post_init__(self) -> None:
        assert self.groups and len({g.layout.block_tokens for g in self.groups}) == 1
        assert min(self.max_running, self.max_chunk_tokens, self.max_model_len, self.tail_every) >= 1

    @property
    def block_tokens(self) -> int:
        return self.groups[0].layout.block_tokens

    @property
    def has_full(self) -> bool:
        return any(group.is_full for group in self.groups)

    def window_need(self, reach: Reach) -> int:
        """Most blocks one running request holds in a window group: W + chunk, a border cut at either end, and sinks."""
        chunk = min(self.max_chunk_tokens, self.max_model_len)
        return min(reach.blocks(chunk + 2, self.block_tokens) + 1, ceil_div(self.max_model_len, self.block_tokens) + 1)

    def slots(self, history_blocks: int) -> tuple[int, ...]:
        """Slots per group so that the full groups hold `history_blocks` blocks beside their null block.

        A window group holds null + R x need + tails, where a tail is the ceil((W-1)/B) blocks that a prefix hit at a
        block border reads: one for every `tail_every` tokens of the history that the full groups can hold (tails
        longer than that distance overlap and count once), and per running request the union of the tails at the last
        three borders of its prompt, which is two blocks more than one tail. No tail is read without its prompt's sinks.
        """
        return tuple(
            NULL_BLOCKS + (history_blocks if group.is_full else self._window_blocks(group.reach, history_blocks))
            for group in self.groups
        )

    def _window_blocks(self, reach: Reach, history_blocks: int) -> int:
        block = self.block_tokens
        tail, sinks = reach.tail_blocks(block), reach.sink_blocks(block)
        permanent = min(tail + sinks, ceil_div(self.tail_every, block))
        permanent *= ceil_div(history_blocks * block, self.tail_every)
        return self.max_running * (self.window_need(reach) + tail + sinks + 2) + permanent

    def pool_bytes(self, history_blocks: int) -> int:
        """Bytes of a pool whose full groups hold `history_blocks` blocks; never decreases with it."""
        return sum(n * g.layout.block_bytes for n, g in zip(self.slots(history_blocks), self.groups, strict=True))

    @property
    def min_history_blocks(self) -> int:
        """The least a pool must hold to compute at all: one chunk, cut at either end, and the staging block."""
        chunk = min(self.max_chunk_tokens, self.max_model_len)
        return ceil_div(chunk, self.block_tokens) + 1 + STAGING_BLOCKS

    @property
    def min_kv_bytes(self) -> int:
        """The minimum pool, window + chunk + null + staging, with every running request's windows."""
        return self.pool_bytes(self.min_history_blocks)

    def blocks_of(self, positions: int) -> int:
        """Blocks a request of `positions` positions (prompt + generated) fills; its last token is never stored."""
        return ceil_div(max(1, positions - 1), self.block_tokens)

    def bytes_for(self, positions: int, requests: int) -> int:
        """Bytes of the smallest pool that holds `requests` requests of `positions` positions each at the same time.

        Without full layers their length asks for nothing: what grows with it are tails, which only later hits read.
        """
        return self.roomy_bytes(positions, requests) if self.has_full else self.min_kv_bytes

    def roomy_bytes(self, positions: int, requests: int) -> int:
        """Bytes of the smallest such pool that also keeps all their permanent window tails."""
        return self.pool_bytes(max(requests * self.blocks_of(positions), self.min_history_blocks))


@dataclass(frozen=True)
class Partition:
    """How many slots each group gets. `pool_bytes` is exactly what the pools allocate.

    `history_blocks` is the capacity of every full group without its null block; in a model without full layers it is
    the history whose permanent tails fit, and limits nothing.
    """

    shape: PoolShape
    history_blocks: int

    @classmethod
    def within(cls, shape: PoolShape, kv_memory: int) -> Partition:
        """The largest pool of this shape in `kv_memory` bytes.

        Without full layers the history is virtual (only its tails are stored), so it ends at R requests of full length.
        """
        assert kv_memory >= shape.min_kv_bytes
        low = shape.min_history_blocks
        high = kv_memory // min(group.layout.block_bytes for group in shape.groups)
        if not shape.has_full:
            high = max(low, shape.max_running * ceil_div(shape.max_model_len, shape.block_tokens))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if shape.pool_bytes(middle) <= kv_memory else (low, middle - 1)
        return cls(shape, low)

    @property
    def num_slots(self) -> tuple[int, ...]:
        return self.shape.slots(self.history_blocks)

    @property
    def pool_bytes(self) -> int:
        return self.shape.pool_bytes(self.history_blocks)

    @property
    def tokens(self) -> int:
        """Tokens of history the full groups hold, all requests together."""
        return self.history_blocks * self.shape.block_tokens

    @property
    def max_running(self) -> int:
        return self.shape.max_running

    def holds(self, positions: int, requests: int = 1) -> bool:
        """Whether `requests` requests of `positions` positions (prompt + generated) each fit at the same time.

        Admission and `plan` both ask this and nothing else. Window groups hold every running request's need by
        construction, so only the full groups and the number of requests decide.
        """
        if requests > self.max_running or positions > self.shape.max_model_len:
            return False
        return not self.shape.has_full or requests * self.shape.blocks_of(positions) <= self.history_blocks

    @property
    def longest_request(self) -> int:
        """Most positions (prompt + generated) one request can have; the last token is never stored, so it is free."""
        longest = self.shape.max_model_len
        return min(longest, self.tokens + 1) if self.shape.has_full else longest


def partition(
    groups: Sequence[LayerGroup],
    kv_memory: int,
    max_running: int,
    max_chunk_tokens: int,
    max_model_len: int,
    tail_every: int = TAIL_EVERY,
) -> Partition:
    """Give window groups what running requests and tails need, and the full groups the rest of `kv_memory` bytes.

    Raises `LongctxError` with both numbers when `kv_memory` does not hold the minimum pool.
    """
    shape = PoolShape(tuple(groups), max_running, max_chunk_tokens, max_model_len, tail_every)
    if kv_memory < shape.min_kv_bytes:
        raise LongctxError(_below_minimum(shape, kv_memory))
    return Partition.within(shape, kv_memory)


def _below_minimum(shape: PoolShape, kv_memory: int) -> str:
    text = (
        f"KV memory of {format_bytes(kv_memory)} ({kv_memory} bytes) does not hold the minimum pool of "
        f"{format_bytes(shape.min_kv_bytes)} for {shape.max_running} running requests in chunks of "
        f"{shape.max_chunk_tokens} tokens: set --kv-memory to at least {shape.min_kv_bytes}"
    )
    for running in range(shape.max_running - 1, 0, -1):
        fewer = PoolShape(shape.groups, running, shape.max_chunk_tokens, shape.max_model_len, shape.tail_every)
        if fewer.min_kv_bytes <= kv_memory:
            return f"{text}, or allow only {running} running"
    return text


def admit(part: Partition, num_prompt_tokens: int, max_tokens: int | None) -> RequestError | None:
    """The reason why a request can never be served, or None.

    The model's limit counts prompt + generated; keys and values are stored for one token less, as the last one is
    never fed back. With `max_tokens` None the request may end at `part.longest_request`, so only room for the prompt
    and one token is asked.
    """
    limit = part.shape.max_model_len
    if num_prompt_tokens < 1:
        return RequestError("the prompt is empty: give at least 1 token")
    if num_prompt_tokens + 1 > limit:
        return ContextLengthError(
            f"the prompt has {num_prompt_tokens:,} tokens and the model {limit:,} positions: shorten the prompt by "
            f"{num_prompt_tokens + 1 - limit:,} tokens, which leaves 1 for the answer"
        )
    total = num_prompt_tokens + (1 if max_tokens is None else max_tokens)
    if total > limit:
        return ContextLengthError(
            f"prompt of {num_prompt_tokens:,} + max_tokens {max_tokens:,} = {total:,} tokens, the model has {limit:,} "
            f"positions: set max_tokens to at most {limit - num_prompt_tokens:,}"
        )
    if part.holds(total):
        return None
    longest = part.longest_request
    if num_prompt_tokens < longest:
        change = f"set max_tokens to at most {longest - num_prompt_tokens:,}"
    else:
        change = f"shorten the prompt by {num_prompt_tokens + 1 - longest:,} tokens, which leaves 1 for the answer"
    return DoesNotFitError(
        f"the request needs {part.shape.blocks_of(total):,} blocks of KV memory for {total:,} tokens, the pool has "
        f"{part.history_blocks:,} for {longest:,}: {change}, or set --kv-memory to at least "
        f"{part.shape.bytes_for(total, 1)} bytes ({format_bytes(part.shape.bytes_for(total, 1))})"
    )


def admit_score(part: Partition, num_tokens: int) -> RequestError | None:
    """The reason why a text can never be scored, or None: nothing is generated, but the last token is stored too."""
    limit, blocks = part.shape.max_model_len, ceil_div(num_tokens, part.shape.block_tokens)
    if num_tokens > limit:
        return ContextLengthError(
            f"the text has {num_tokens:,} tokens and the model {limit:,} positions: shorten it by "
            f"{num_tokens - limit:,} tokens"
        )
    if not part.shape.has_full or blocks <= part.history_blocks:
        return None
    needed = part.shape.bytes_for(num_tokens + 1, 1)
    return DoesNotFitError(
        f"scoring {num_tokens:,} tokens needs {blocks:,} blocks of KV memory, the pool has {part.history_blocks:,} for "
        f"{part.tokens:,} tokens: shorten the text by {num_tokens - part.tokens:,} tokens, or set --kv-memory to at "
        f"least {needed} bytes ({format_bytes(needed)})"
    )
