"""What must hold on a CUDA device: plain functions for pytest and for `tools/gpu_check.py`, which needs no pytest.

On "cpu" the same functions try themselves; Triton's kernels then run in its interpreter.
"""

# Shape legend: T query tokens, S stored tokens, H query heads, K kv heads, D head dim.
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from longctx.attention.naive import naive_state
from longctx.attention.registry import BACKENDS, pick_backends, why_unavailable
from longctx.attention.span import AttnParams
from longctx.attention.state import AttnState, merge
from longctx.quant.formats import FORMATS
from longctx.quant.store import gather_tokens, store_tokens
from tests.helpers.attention import assert_close, decode, prefill, random_sequence
from tests.helpers.engine import generate, make_engine, score_all
from tests.helpers.storage import BLOCK, assert_same_layer, hard_vectors, poisoned_layer, same_bits
from tests.helpers.tiny import hf_logits, hf_logits64, make_tiny, random_ids

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2}
"""Relative and absolute, by the queries' dtype: products add up in an order that is the device's own, and with bf16
queries weights are rounded to bf16 before they meet the values."""


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
    dtype: torch.dtype = torch.float32
    tokens: int = 2500

    def __str__(self) -> str:
        parts = [f"{self.heads}/{self.kv_heads} heads of {self.dim}", self.fmt]
        parts += [f"{name} {value}" for name in ("v_dim", "window", "softcap") if (value := getattr(self, name))]
        return ", ".join(parts) + (", bf16 queries" if self.dtype == torch.bfloat16 else "")


ATTENTION_CASES = (
    *(AttentionCase(12, 3, 16, window=window) for window in (None, 1, 31, 33, 512, 3000)),
    AttentionCase(9, 3, 64),
    AttentionCase(32, 8, 128),
    AttentionCase(4, 1, 256, window=512),
    AttentionCase(8, 4, 32, softcap=5.0),
    AttentionCase(8, 4, 32, window=100, softcap=20.0),
    AttentionCase(6, 2, 24, v_dim=16, window=77),
    AttentionCase(9, 3, 64, window=512, fmt="fp16"),
    *(AttentionCase(8, 1, 80, fmt=fmt) for fmt in FORMATS if fmt != "fp32"),
    *(AttentionCase(32, 8, 128, fmt=fmt, dtype=torch.bfloat16) for fmt in FORMATS if fmt != "fp32"),
    AttentionCase(16, 8, 256, window=512, softcap=50.0, fmt="int8", dtype=torch.bfloat16),
)

INTERPRETER_CASES = (
    AttentionCase(4, 1, 64, window=33, fmt="bf16", tokens=150),
    AttentionCase(3, 1, 80, fmt="fp8_e4m3", tokens=150),
    AttentionCase(4, 2, 128, softcap=20.0, fmt="int8", tokens=150),
    AttentionCase(2, 2, 96, fmt="int4", tokens=150),
)
"""Few and small: the interpreter takes a millisecond for what a GPU does in one of its clock's ticks."""

ENGINE_KINDS = ("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3_longrope", "llama_dynamic", "gpt_oss")
"""Windows, soft-caps, sinks, rope regimes, tied heads: what a device move could break."""

LOSSY_ENGINES = (*(("llama", fmt) for fmt in FORMATS if FORMATS[fmt].lossy), ("gemma3_text", "int8"))


def gpu_backends(device: str) -> list[str]:
    """The backends that a GPU's user could choose and that run on `device`; "auto" may be a mixture of them."""
    names = [name for name in BACKENDS if name != "numba" and why_unavailable(name, device) is None]
    return names if device == "cpu" else [*names, "auto"]


def check_attention(case: AttentionCase, backend: str, device: str) -> None:
    """Prefill whole, prefill in chunks and decode beside attention in float64; unwritten rows hold NaN."""
    torch.manual_seed(0)
    backends = pick_backends(device, backend)
    decoder = backends.decode or backends.prefill
    sequence = random_sequence(case.tokens, case.kv_heads, case.dim, case.v_dim, device=device, fmt=case.fmt)
    params = AttnParams(case.dim**-0.5, case.window, case.softcap)
    start = case.tokens * 4 // 5 - 10
    q_THD = (torch.randn(len(sequence) - start, case.heads, case.dim) * 2).to(case.dtype).to(device)
    rows = [row for row in (0, 1, 57, 58, 59, 60, 300) if row < len(q_THD) - 1] + [len(q_THD) - 1]
    positions = [start + row for row in rows]
    k_KSD, v_KSD = (_as_stored(x, case.fmt) for x in (sequence.k, sequence.v))
    at = torch.as_tensor(positions, device=device)
    expected = naive_state(q_THD[rows].float(), at, k_KSD, v_KSD, 0, params)
    tolerance = TOLERANCE[case.dtype]

    def chunk_state(begin: int, end: int) -> AttnState:
        tile = backends.span_tokens
        return prefill(backends.prefill, q_THD[begin:end], start + begin, sequence, params, tile=tile)

    whole = chunk_state(0, len(q_THD))
    assert whole.out.device.type == torch.device(device).type, f"the answer lies on {whole.out.device}"
    assert_close(AttnState(whole.out[rows], whole.lse[rows]), expected, tolerance)
    assert_close(decode(decoder, q_THD[rows], positions, sequence, params), expected, tolerance)
    for begin in range(0, len(q_THD), 173):
        part, same = chunk_state(begin, begin + 173), slice(begin, begin + 173)
        assert_close(part, AttnState(whole.out[same], whole.lse[same]), tolerance)


def _as_stored(x_KSD: torch.Tensor, fmt: str) -> torch.Tensor:
    """What a vector reads back as, fp32, by the codec and on the CPU."""
    codec, x = FORMATS[fmt].codec, x_KSD.cpu()
    out = torch.empty_like(x, dtype=torch.float32)
    codec.decode(*codec.encode(x), out)
    return out.to(x_KSD.device)


def check_storage(fmt: str, device: str) -> None:
    """What the kernels store is what the codec stores on a CPU, bit for bit, and reads back so; blocks move whole."""
    # Only here: whoever has no triton can still check the rest.
    from longctx.quant import blocks_triton, store_triton

    for dim, dtype in ((64, torch.bfloat16), (80, torch.float32), (128, torch.float16)):
        reference, layer = (poisoned_layer(fmt, fmt, dim, dim, on) for on in ("cpu", device))
        k_KTD, v_KTD = (hard_vectors(2, 37, dim, dtype, "cpu") for _ in range(2))
        table, positions = np.array([4, 2, 5]), np.arange(37)
        where = table[positions // BLOCK], positions % BLOCK
        store_tokens(reference, *where, k_KTD, v_KTD)
        store_triton.store_tokens(layer, *where, k_KTD.to(device), v_KTD.to(device))
        assert_same_layer(reference, layer)
        out = tuple(torch.full((2, 50, dim), math.nan, device=device) for _ in range(2))
        store_triton.gather_tokens(layer, table, 3, 34, (out[0], out[1]))
        for expected, got in zip(gather_tokens(reference, table, 3, 34, 50), out, strict=True):
            assert same_bits(expected, got), "what reads back differs"
    pool = torch.randint(0, 256, (64 * 263 * 5,), dtype=torch.uint8).to(device)
    buffer = torch.zeros(2, 64 * 263, dtype=torch.uint8, device=device)
    blocks_triton.gather_blocks(pool, 64 * 263, np.array([4, 1]), buffer)
    assert torch.equal(buffer, pool.view(5, -1)[[4, 1]]), "blocks differ"
    blocks_triton.scatter_blocks(pool, 64 * 263, np.array([0, 3]), buffer)
    assert torch.equal(buffer, pool.view(5, -1)[[0, 3]]), "blocks differ on the way back"


def check_merge(device: str) -> None:
    """The merge kernel beside torch's operators; rows that have seen nothing; a transposed log-sum."""
    from longctx.attention.kernels import merge_triton

    states = []
    for _ in range(2):
        empty = torch.rand(300, 9) < 0.2
        lse = (torch.rand(300, 9) * 160 - 80).masked_fill(empty, -math.inf)
        states.append(AttnState(torch.randn(300, 9, 80).masked_fill(empty[..., None], 0.0).to(device), lse.to(device)))
    expected = merge(*states)
    state = AttnState(states[0].out, states[0].lse.t().contiguous().t())
    merge_triton.merge_into(state, states[1])
    assert_close(state, expected, 1e-6)


def check_engine(kind: str, attention: str, device: str) -> None:
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
    engine = make_engine(model, kv_tokens=4096, chunk_tokens=111, attention=attention)
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


def check_lossy_engine(kind: str, fmt: str, attention: str, device: str) -> None:
    """An engine with a lossy cache: the same bits whatever the chunk, and close to the same engine on the CPU."""
    ids = random_ids(330)
    model = make_tiny(kind)
    [expected] = score_all(make_engine(model, kv_format=fmt, attention="torch"), [ids])
    whole, parts = (
        score_all(make_engine(model.to(device), kv_format=fmt, attention=attention, chunk_tokens=n), [ids])[0]
        for n in (400, 64)
    )
    assert np.array_equal(whole, parts), f"logits change by {np.abs(whole - parts).max():.1e} with the chunk"
    # Rounding of 1e-6 may flip a code, and one step of int4's is a fifteenth of a group's range.
    bound = 0.1 if fmt == "int4" else 0.02
    error = np.abs(whole - expected).max()
    assert error < bound, f"logits differ from the CPU's by {error:.1e}, allowed are {bound}"
