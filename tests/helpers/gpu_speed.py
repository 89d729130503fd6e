"""How fast attention runs on a device, beside a copy, a matrix product and torch's own attention measured there."""

# Shape legend: T query tokens, S stored tokens, R sequences, H query heads, K kv heads, D head dim.
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from longctx.attention.attend import attend
from longctx.attention.registry import pick_backends
from longctx.attention.span import AttnParams, DecodeBatch, KVView, prefill_spans
from longctx.quant.formats import FORMATS
from longctx.quant.layout import BlockLayout
from longctx.quant.store import store_tokens

HEADS, KV_HEADS, DIM = 32, 8, 128
BLOCK_TOKENS = 256
CACHE_BYTES = 1 << 30
"""So many bytes are read before the same ones are read again: no cache of a GPU holds them."""


def limits(device: str, *, copy_bytes: int, matmul: int) -> dict[str, float]:
    """Bytes per second that a copy of `copy_bytes` moves, read and written, and FLOP/s of a square bf16 product."""
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    a, b = (torch.randn(matmul, matmul, device=device, dtype=torch.bfloat16) for _ in range(2))
    return {
        "copy_bytes_per_s": 2 * copy_bytes / seconds(lambda: target.copy_(source), device),
        "matmul_flops_per_s": 2 * matmul**3 / seconds(lambda: a @ b, device),
    }


def decode_speed(fmt: str, history: int, backend: str, device: str, cache_bytes: int = CACHE_BYTES) -> dict[str, Any]:
    """KV bytes per second, scales included, of one token's attention over `history` keys of a `fmt` pool.

    As many such caches are read in turn as make `cache_bytes`: a step's layers. On a GPU they are replayed as a CUDA
    graph where the backend can be captured, so that launches are not what is measured.
    """
    layout = _layout(fmt)
    num_blocks = -(-history // BLOCK_TOKENS)
    num_caches = max(1, -(-cache_bytes // (layout.block_bytes * num_blocks)))
    layer = _filled_layer(layout, num_caches * num_blocks + 1, device)
    tables = 1 + np.random.default_rng(0).permutation(num_caches * num_blocks).reshape(num_caches, 1, num_blocks)
    batches = [DecodeBatch(table, np.array([history - 1], np.int64)) for table in tables]
    # A backend of its own for each: it keeps the plan of one batch.
    backends = [pick_backends(device, backend) for _ in batches]
    q_RHD = torch.randn(1, HEADS, DIM, device=device, dtype=torch.bfloat16)
    params = AttnParams(DIM**-0.5)

    def step() -> None:
        for each, batch in zip(backends, batches, strict=True):
            (each.decode or each.prefill).decode_state(q_RHD, layer, batch, params)

    spent_s, graph = graph_seconds(step, device)
    vector = sum(FORMATS[fmt].data_bytes(DIM) + FORMATS[fmt].scale_bytes(DIM) for _ in "kv")
    num_bytes = num_caches * history * KV_HEADS * vector
    return {
        "work": "decode",
        "backend": backend,
        "format": fmt,
        "history": history,
        "graph": graph,
        "bytes_per_s": num_bytes / spent_s,
    }


def prefill_speed(fmt: str, history: int, chunk: int, backend: str, device: str) -> dict[str, Any]:
    """Useful FLOP/s of the last `chunk` of `history` tokens, bf16 queries over a `fmt` pool."""
    layer = _filled_layer(_layout(fmt), -(-history // BLOCK_TOKENS) + 1, device)
    view = KVView(layer, np.arange(1, layer.k.shape[0], dtype=np.int64))
    backends = pick_backends(device, backend)
    q_THD = torch.randn(chunk, HEADS, DIM, device=device, dtype=torch.bfloat16)
    params, start = AttnParams(DIM**-0.5), history - chunk

    def step() -> None:
        attend(q_THD, start, prefill_spans(view, start, chunk, params, backends.span_tokens), params, backends.prefill)

    return _prefill_row(fmt, history, chunk, backend, seconds(step, device))


def torch_prefill_speed(history: int, chunk: int, device: str) -> dict[str, Any]:
    """The same by torch's `scaled_dot_product_attention` over contiguous bf16 keys, cut for it at the right end."""
    q, k, v = (
        torch.randn(1, heads, tokens, DIM, device=device, dtype=torch.bfloat16)
        for heads, tokens in ((HEADS, chunk), (KV_HEADS, history), (KV_HEADS, history))
    )
    mask = causal_lower_right(chunk, history)
    # Heads are repeated beforehand: not every kernel that takes this mask knows groups.
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    spent_s = seconds(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), device)
    return _prefill_row("bf16", history, chunk, "torch's SDPA, contiguous", spent_s)


def flash_prefill_speed(history: int, chunk: int, device: str) -> dict[str, Any] | None:
    """The same by the flash-attn package, contiguous; None where it is not installed."""
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None
    q, k, v = (
        torch.randn(1, tokens, heads, DIM, device=device, dtype=torch.bfloat16)
        for heads, tokens in ((HEADS, chunk), (KV_HEADS, history), (KV_HEADS, history))
    )
    spent_s = seconds(lambda: flash_attn_func(q, k, v, causal=True), device)
    return _prefill_row("bf16", history, chunk, "flash-attn, contiguous", spent_s)


def _prefill_row(fmt: str, history: int, chunk: int, backend: str, spent_s: float) -> dict[str, Any]:
    pairs = chunk * (history - chunk) + chunk * (chunk + 1) // 2
    return {
        "work": "prefill",
        "backend": backend,
        "format": fmt,
        "history": history,
        "chunk": chunk,
        "flops_per_s": 4 * HEADS * DIM * pairs / spent_s,
    }


def _layout(fmt: str) -> BlockLayout:
    return BlockLayout(1, KV_HEADS, BLOCK_TOKENS, DIM, DIM, FORMATS[fmt], FORMATS[fmt])


def _filled_layer(layout: BlockLayout, num_slots: int, device: str) -> Any:
    """A pool in which every slot but the null block holds the same block of random keys and values."""
    pool = torch.zeros(layout.block_bytes * num_slots, dtype=torch.uint8, device=device)
    layer = layout.layer_view(pool, 0)
    k_KTD, v_KTD = (torch.randn(KV_HEADS, BLOCK_TOKENS, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    store_tokens(layer, np.ones(BLOCK_TOKENS, np.int64), np.arange(BLOCK_TOKENS), k_KTD, v_KTD)
    blocks = pool.view(num_slots, -1)
    blocks[2:] = blocks[1]
    return layer


def seconds(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    """The best of `repeats` after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        _wait(device)
        before = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - before)
    return min(times[1:])


def graph_seconds(work: Callable[[], object], device: str) -> tuple[float, bool]:
    """(`seconds` of the work as a CUDA graph, True), or of the work itself and False where it cannot be captured."""
    if device == "cpu":
        return seconds(work, device), False
    work()
    _wait(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        return seconds(work, device), False
    return seconds(graph.replay, device), True


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
