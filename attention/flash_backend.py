"""Prefill by flash-attn or torch's `varlen_attn` where one is installed and does what it says; the rest is Triton's."""

# Shape legend: T query tokens of one sequence, N slots, B block tokens, H query heads, K kv heads, D head dim.
from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from longctx.attention.backend import Backend
from longctx.attention.naive import naive_state
from longctx.attention.span import AttnParams, DecodeBatch, KVView, Span
from longctx.attention.state import AttnState
from longctx.quant.formats import FORMATS
from longctx.quant.layout import BlockLayout, LayerKV
from longctx.quant.store import store_tokens

try:
    from flash_attn import flash_attn_varlen_func
except (ImportError, OSError):  # not installed, or built for another torch
    flash_attn_varlen_func = None
try:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn
except ImportError:
    AuxRequest = varlen_attn = None  # type: ignore[assignment,misc]

PAGE = 256
"""Blocks must be whole multiples of this many tokens for both libraries."""
LARGEST_DIM = 256
HALVES = ("bf16", "fp16")


class PagedAttention(Protocol):
    """One library's function: T queries over `num_keys` keys, the last query standing at the last key.

    `window` is (keys before its own that a query sees, -1 for all; 0 for causal or -1). `table` is int32 [blocks].
    Answers out [T, H, D] in the queries' dtype and the natural-log lse, in whatever layout the library has it.
    """

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_NBKD: torch.Tensor,
        v_NBKD: torch.Tensor,
        table: torch.Tensor,
        num_keys: int,
        scale: float,
        window: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def flash_attn_call(varlen_func: Callable[..., Any]) -> PagedAttention:
    """flash-attn's `flash_attn_varlen_func`: a block table of int32, lse [H, T] or [1, H, T] by version."""

    def call(q_THD, k_NBKD, v_NBKD, table, num_keys, scale, window):  # type: ignore[no-untyped-def]
        num_tokens = q_THD.shape[0]
        out, lse, _ = varlen_func(
            q_THD, k_NBKD, v_NBKD, _ends(num_tokens, q_THD.device), _ends(num_keys, q_THD.device), num_tokens, num_keys,
            softmax_scale=scale, causal=window[1] == 0, window_size=window, return_attn_probs=True,
            block_table=table[None],
        )  # fmt: skip
        return out, lse[0, :, :num_tokens] if lse.dim() == 3 else lse

    return call


def varlen_call(varlen_attn: Callable[..., Any], aux: Any) -> PagedAttention:
    """torch's `varlen_attn`, without split KV, so that a row does not depend on how long its sequence is."""

    def call(q_THD, k_NBKD, v_NBKD, table, num_keys, scale, window):  # type: ignore[no-untyped-def]
        num_tokens = q_THD.shape[0]
        return varlen_attn(
            q_THD, k_NBKD, v_NBKD, _ends(num_tokens, q_THD.device), None, num_tokens, num_keys,
            return_aux=aux, scale=scale, window_size=window, enable_gqa=True,
            seqused_k=_ends(num_keys, q_THD.device)[1:], block_table=table[None], num_splits=1,
        )  # fmt: skip

    return call


def installed_calls() -> list[PagedAttention]:
    """The functions that this machine's libraries offer with the arguments needed here, the preferred one first."""
    found = []
    if flash_attn_varlen_func is not None and _takes(flash_attn_varlen_func, "block_table", "window_size"):
        found.append(flash_attn_call(flash_attn_varlen_func))
    if varlen_attn is not None and _takes(varlen_attn, "block_table", "seqused_k", "num_splits", "enable_gqa"):
        found.append(varlen_call(varlen_attn, AuxRequest(lse=True)))
    return found


def _takes(function: Callable[..., Any], *names: str) -> bool:
    return set(names) <= set(inspect.signature(function).parameters)


def _ends(num: int, device: torch.device) -> torch.Tensor:
    """Where one sequence of `num` begins and ends, as both libraries take it."""
    return torch.tensor([0, num], dtype=torch.int32, device=device)


class FlashBackend:
    """Prefills 16-bit pools without a soft-cap by a library's kernel, and leaves everything else to `rest`.

    Which of them computes a row's share of a span depends on the row's position and the span alone. Blocks that slid
    out of a window are not named to the library: it may multiply what lies there by 0. For one thread at a time.
    """

    name = "flash"

    def __init__(self, call: PagedAttention, heads_first: bool, rest: Backend) -> None:
        self._call = call
        self._heads_first = heads_first
        self._rest = rest

    def span_state(self, q_THD: torch.Tensor, start: int, span: Span, params: AttnParams) -> AttnState:
        span_end = span.start + span.length
        if span.length == 0 or start < span.start or not _is_readable(q_THD, span, params):
            return self._rest.span_state(q_THD, start, span, params)
        # The libraries' masks end at the last key. Rows past it see all keys or, under a window, are left to the rest.
        inside = min(max(0, span_end - start), q_THD.shape[0])
        states = []
        if inside:
            first = span.start if params.window is None else max(span.start, start - params.window + 1)
            before = -1 if params.window is None else params.window - 1
            states.append(self._run(q_THD[:inside], span, first, start + inside, params.scale, (before, 0)))
        if inside < q_THD.shape[0]:
            if params.window is None:
                states.append(self._run(q_THD[inside:], span, span.start, span_end, params.scale, (-1, -1)))
            else:
                states.append(self._rest.span_state(q_THD[inside:], start + inside, span, params))
        if len(states) == 1:
            return states[0]
        return AttnState(torch.cat([s.out for s in states]), torch.cat([s.lse for s in states]))

    def decode_state(self, q_RHD: torch.Tensor, layer: LayerKV, batch: DecodeBatch, params: AttnParams) -> AttnState:
        return self._rest.decode_state(q_RHD, layer, batch, params)

    def _run(
        self, q_THD: torch.Tensor, span: Span, first: int, end: int, scale: float, window: tuple[int, int]
    ) -> AttnState:
        """State over the keys from the block of position `first` up to `end`."""
        layer, num_tokens = span.view.layer, q_THD.shape[0]
        block = first // layer.block_tokens
        table = span.view.table[block : -(-end // layer.block_tokens)].astype(np.int32)
        # One row alone would take another kernel than the same row in a chunk: it gets a neighbour before it.
        padded_THD = q_THD.contiguous() if num_tokens > 1 else torch.cat((q_THD, q_THD))
        out, lse = self._call(
            padded_THD,
            layer.k.transpose(1, 2),
            layer.v.transpose(1, 2),
            torch.from_numpy(table).to(q_THD.device),
            end - block * layer.block_tokens,
            scale,
            window,
        )
        return _normalized(out[-num_tokens:], (lse.T if self._heads_first else lse)[-num_tokens:])


def _is_readable(q_THD: torch.Tensor, span: Span, params: AttnParams) -> bool:
    """One 16-bit dtype, one head dim, whole pages, and no mask but causality and a window."""
    layer = span.view.layer
    return (
        layer.k_format.name in HALVES
        and q_THD.dtype == layer.k.dtype == layer.v.dtype
        and layer.k_dim == layer.v_dim <= LARGEST_DIM
        and layer.k_dim % 8 == 0
        and layer.block_tokens % PAGE == 0
        and span.start % layer.block_tokens == 0
        and params.softcap is None
        and params.local_chunk is None
        and params.sinks == 0
    )


def _normalized(out_THD: torch.Tensor, lse_TH: torch.Tensor) -> AttnState:
    """A library's answer as a state: contiguous fp32; rows without a key, which some mark with +inf, are (0, -inf)."""
    empty_TH = lse_TH.isinf()
    lse = lse_TH.float().masked_fill(empty_TH, -math.inf).contiguous()
    return AttnState(out_THD.float().masked_fill(empty_TH.unsqueeze(-1), 0.0), lse)


def with_flash(rest: Backend, device: torch.device | str, calls: list[PagedAttention] | None = None) -> Backend:
    """`rest` behind the first library that passes its examination on `device`; `rest` itself if none does."""
    for call in installed_calls() if calls is None else calls:
        for heads_first in (True, False):
            if _passes(FlashBackend(call, heads_first, rest), device):
                return FlashBackend(call, heads_first, rest)
    return rest


def _passes(backend: FlashBackend, device: torch.device | str) -> bool:
    """Whether a library gives attention with a natural-log lse in this layout, a row's bits whatever its chunk.

    Wrong bases and layouts have been released (vllm-project/vllm#52796, #22003): this asks the installed one.
    """
    generator = torch.Generator().manual_seed(0)
    k_KSD, v_KSD, q_HTD = (torch.randn(n, 300, 64, generator=generator).bfloat16() for n in (2, 2, 6))
    layout = BlockLayout(1, 2, PAGE, 64, 64, FORMATS["bf16"], FORMATS["bf16"])
    layer = layout.layer_view(torch.zeros(4 * layout.block_bytes, dtype=torch.uint8, device=device), 0)
    table, positions = np.array([3, 1]), np.arange(300)
    store_tokens(layer, table[positions // PAGE], positions % PAGE, k_KSD.to(device), v_KSD.to(device))
    q_THD = q_HTD.transpose(0, 1)[200:]
    span = Span(KVView(layer, table), 0, 300)
    for params in (AttnParams(0.125), AttnParams(0.125, 40)):
        expected = naive_state(q_THD, torch.arange(200, 300), k_KSD, v_KSD, 0, params)
        try:
            whole = backend.span_state(q_THD.to(device), 200, span, params)
            cuts = ((0, 1), (1, 37), (37, 100))
            spans = [Span(span.view, 0, 200 + end) for _, end in cuts]
            parts = [
                backend.span_state(q_THD[a:b].to(device), 200 + a, s, params)
                for (a, b), s in zip(cuts, spans, strict=True)
            ]
        except (RuntimeError, TypeError, ValueError, IndexError):  # no kernel for this device, or other arguments
            return False
        right = whole.lse.shape == expected.lse.shape and (whole.lse.cpu() - expected.lse).abs().max() < 1e-2
        if not right or (whole.out.cpu() - expected.out).abs().max() > 5e-2:
            return False
        if not torch.equal(torch.cat([p.out for p in parts]), whole.out):
            return False
    return True
