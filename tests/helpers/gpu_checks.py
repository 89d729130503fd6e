"""What must hold on a CUDA device: plain functions for pytest and for `tools/gpu_check.py`, which needs no pytest."""

# Shape legend: T query tokens, S stored tokens, H query heads, K kv heads, D head dim.
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longctx.attention.naive import naive_state
from longctx.attention.span import AttnParams
from longctx.attention.state import AttnState
from longctx.attention.torch_backend import TorchBackend
from tests.helpers.attention import assert_close, decode, prefill, random_sequence
from tests.helpers.engine import generate, make_engine, score_all
from tests.helpers.tiny import hf_logits, hf_logits64, make_tiny, random_ids

ATTENTION_TOLERANCE = 3e-5
"""Relative and absolute; products in fp32 add up in an order that is the device's own."""


@dataclass(frozen=True)
class AttentionCase:
    """One layer's geometry and pool; `softcap` and V narrower than K take paths of their own."""

    heads: int
    kv_heads: int
    dim: int
    v_dim: int | None = None
    window: int | None = None
    softcap: float | None = None
    fmt: str = "fp32"

    def __str__(self) -> str:
        parts = [f"{self.heads}/{self.kv_heads} heads of {self.dim}", self.fmt]
        parts += [f"{name} {value}" for name in ("v_dim", "window", "softcap") if (value := getattr(self, name))]
        return ", ".join(parts)


ATTENTION_CASES = (
    *(AttentionCase(12, 3, 16, window=window) for window in (None, 1, 31, 33, 512, 3000)),
    AttentionCase(9, 3, 64),
    AttentionCase(32, 8, 128),
    AttentionCase(4, 1, 256, window=512),
    AttentionCase(8, 4, 32, softcap=5.0),
    AttentionCase(8, 4, 32, window=100, softcap=20.0),
    AttentionCase(6, 2, 24, v_dim=16, window=77),
    AttentionCase(9, 3, 64, fmt="bf16"),
    AttentionCase(9, 3, 64, window=512, fmt="fp16"),
)

ENGINE_KINDS = ("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3_longrope", "llama_dynamic", "gpt_oss")
"""Windows, soft-caps, sinks, rope regimes, tied heads: what a device move could break."""


def check_attention(case: AttentionCase, device: str) -> None:
    """Prefill whole, prefill in chunks and decode beside attention in float64; unwritten rows hold NaN."""
    torch.manual_seed(0)
    sequence = random_sequence(2500, case.kv_heads, case.dim, case.v_dim, device=device, fmt=case.fmt)
    params = AttnParams(case.dim**-0.5, case.window, case.softcap)
    start = 1990
    q_THD = (torch.randn(len(sequence) - start, case.heads, case.dim) * 2).to(device)
    rows = [0, 1, 57, 58, 59, 60, 300, len(q_THD) - 1]
    positions = [start + row for row in rows]
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.fmt]
    k_KSD, v_KSD = (x.to(stored).float() for x in (sequence.k, sequence.v))
    expected = naive_state(q_THD[rows], torch.as_tensor(positions, device=device), k_KSD, v_KSD, 0, params)
    backend = TorchBackend()

    whole = prefill(backend, q_THD, start, sequence, params)
    assert whole.out.device.type == torch.device(device).type, f"the answer lies on {whole.out.device}"
    assert_close(AttnState(whole.out[rows], whole.lse[rows]), expected, ATTENTION_TOLERANCE)
    assert_close(decode(backend, q_THD[rows], positions, sequence, params), expected, ATTENTION_TOLERANCE)
    for begin in range(0, len(q_THD), 173):
        chunk = slice(begin, begin + 173)
        part = prefill(backend, q_THD[chunk], start + begin, sequence, params)
        assert_close(part, AttnState(whole.out[chunk], whole.lse[chunk]), ATTENTION_TOLERANCE)


def check_engine(kind: str, device: str) -> None:
    """An engine's logits beside Hugging Face eager's on the same device, then greedy tokens with and without the cache.

    The bound is 1e-4 or three times Hugging Face's own distance to float64. A prompt asked again, all of it cached,
    must go on to the same tokens; one that shares its beginning copies rows of a block.
    """
    model = make_tiny(kind)
    model.config._experts_implementation = "eager"
    length = 200 if kind == "llama_dynamic" else 600  # beyond the 64 positions after which its regime changes
    ids = random_ids(length)
    wide = hf_logits64(model, ids)
    model = model.to(device)
    theirs = hf_logits(model, ids).cpu()
    engine = make_engine(model, kv_tokens=4096, chunk_tokens=111)
    assert engine.runner.storage.device.type == torch.device(device).type
    [ours] = score_all(engine, [ids])
    error = (torch.from_numpy(ours).double() - wide).abs().max().item()
    bound = max(1e-4, 3 * (theirs.double() - wide).abs().max().item())
    assert error <= bound, f"logits of {kind} differ by {error:.2e}, allowed are {bound:.2e}"

    cold_ids = random_ids(length - 20, seed=1)
    cold, warm = (generate(engine, cold_ids, max_tokens=12) for _ in range(2))
    assert cold.usage.cached_tokens == 0 and warm.usage.cached_tokens == len(cold_ids) - 1, (cold.usage, warm.usage)
    assert cold.token_ids == warm.token_ids, f"{kind}: a cached prompt goes on differently"
    # As many tokens in all: the regime of dynamic rope, and with it the key, goes by that.
    other = generate(engine, cold_ids[:-5] + random_ids(7, seed=2), max_tokens=10, temperature=1.0, seed=7)
    assert 0 < other.usage.cached_tokens <= len(cold_ids) - 5, other.usage


def measure(device: str, *, history: int, chunk: int, copy_bytes: int) -> dict[str, Any]:
    """Prefill and decode attention of the torch backend: useful FLOP/s and KV bytes/s beside a copy of `copy_bytes`.

    One layer of 32 query and 8 KV heads of 128, a bf16 pool. `share_of_copy` is KV bytes read per second over twice the
    bytes that a copy moves in a second.
    """
    heads, kv_heads, dim = 32, 8, 128
    sequence = random_sequence(history, kv_heads, dim, device=device, fmt="bf16", block_tokens=256)
    params = AttnParams(dim**-0.5)
    backend = TorchBackend()
    q_THD = torch.randn(chunk, heads, dim).to(device)
    start = history - chunk
    prefill_s = _best_seconds(lambda: prefill(backend, q_THD, start, sequence, params), device)
    decode_s = _best_seconds(lambda: decode(backend, q_THD[-1:], [history - 1], sequence, params), device)
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    copy_s = _best_seconds(lambda: target.copy_(source), device)
    pairs = chunk * start + chunk * (chunk + 1) // 2
    flops, kv_bytes = 4 * heads * dim * pairs, 2 * history * kv_heads * dim * 2
    return {
        "shape": f"{heads}/{kv_heads} heads of {dim}, bf16 pool, fp32 products",
        "history": history,
        "chunk": chunk,
        "prefill_flops_per_s": flops / prefill_s,
        "decode_bytes_per_s": kv_bytes / decode_s,
        "copy_bytes_per_s": 2 * copy_bytes / copy_s,
        "share_of_copy": kv_bytes / decode_s / (2 * copy_bytes / copy_s),
    }


def _best_seconds(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        _wait(device)
        before = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - before)
    return float(np.min(times[1:]))


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
