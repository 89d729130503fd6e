"""Copies whole blocks, or the same bytes of each, between a pool and a contiguous buffer, in one launch."""

# Shape legend: n blocks, N slots.
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from longctx.quant.kernel_variant import KernelVariant

WORDS = 2048
"""4-byte words that one program copies at most: 16 bytes by each of 128 threads, four times."""


@triton.jit
def _copy_blocks_kernel(
    pool_ptr, buffer_ptr, slots_ptr, block_words, begin_word, num_words, TO_POOL: tl.constexpr, WORDS: tl.constexpr
):
    """Grid [parts of a block, n]."""
    block = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    mask = word < num_words
    in_pool = pool_ptr + tl.load(slots_ptr + block) * block_words + begin_word + word
    in_buffer = buffer_ptr + block * num_words + word
    if TO_POOL:
        tl.store(in_pool, tl.load(in_buffer, mask), mask)
    else:
        tl.store(in_buffer, tl.load(in_pool, mask), mask)


def gather_blocks(
    pool: torch.Tensor,
    block_bytes: int,
    slots: np.ndarray | torch.Tensor,
    buffer: torch.Tensor,
    begin: int = 0,
    end: int | None = None,
) -> None:
    """Copy bytes [begin, end) of the blocks in `slots` [n] into `buffer` uint8 [n, end - begin], contiguous.

    `pool` is flat uint8, N blocks of `block_bytes`; `end` None is the block's end, `begin` and `end` are multiples of
    64, as segments are. Both tensors lie on one device; the copy is queued on its current stream.
    """
    _copy(pool, block_bytes, slots, buffer, begin, end, to_pool=False)


def scatter_blocks(
    pool: torch.Tensor,
    block_bytes: int,
    slots: np.ndarray | torch.Tensor,
    buffer: torch.Tensor,
    begin: int = 0,
    end: int | None = None,
) -> None:
    """The way back: bytes [begin, end) of the blocks in `slots` become `buffer`'s. No slot may come twice."""
    _copy(pool, block_bytes, slots, buffer, begin, end, to_pool=True)


def _copy(
    pool: torch.Tensor,
    block_bytes: int,
    slots: np.ndarray | torch.Tensor,
    buffer: torch.Tensor,
    begin: int,
    end: int | None,
    *,
    to_pool: bool,
) -> None:
    size = (block_bytes if end is None else end) - begin
    assert pool.dtype == buffer.dtype == torch.uint8 and pool.dim() == 1 and pool.numel() % block_bytes == 0
    assert begin % 64 == size % 64 == block_bytes % 64 == 0 and 0 <= begin <= begin + size <= block_bytes
    assert buffer.shape == (len(slots), size) and buffer.is_contiguous() and buffer.device == pool.device
    if buffer.numel() == 0:
        return
    slots_n = torch.as_tensor(slots, dtype=torch.int64, device=pool.device).contiguous()
    words = size // 4
    grid = (triton.cdiv(words, WORDS), len(slots))
    _copy_blocks_kernel[grid](
        pool.view(torch.int32),
        buffer.view(torch.int32),
        slots_n,
        block_bytes // 4,
        begin // 4,
        words,
        TO_POOL=to_pool,
        WORDS=WORDS,
    )


def variants(arch: int) -> list[KernelVariant]:
    """Both directions."""
    del arch  # nothing here depends on it
    types = ["*i32", "*i32", "*i64", "i32", "i32", "i32", "constexpr", "constexpr"]
    signature = dict(zip(_copy_blocks_kernel.arg_names, types, strict=True))
    return [
        KernelVariant(
            "scatter_blocks" if to_pool else "gather_blocks",
            _copy_blocks_kernel,
            signature,
            {"TO_POOL": to_pool, "WORDS": WORDS},
            divisible=("block_words", "begin_word", "num_words"),
        )
        for to_pool in (False, True)
    ]
