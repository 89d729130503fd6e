"""The adapters to flash-attn and `varlen_attn`, against functions that answer as those are documented to."""

# Shape legend: T query tokens, S keys, N slots, B block tokens, H query heads, K kv heads, D head dim.
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from longctx.attention.flash_backend import FlashBackend, flash_attn_call, varlen_call, with_flash
from longctx.attention.span import AttnParams, KVView, Span
from longctx.attention.state import AttnState
from longctx.attention.torch_backend import TorchBackend
from tests.helpers.attention import Sequence, assert_close, assert_same_bits, random_sequence


def paged(q_THD, k_NBKD, v_NBKD, table, num_keys, scale, window) -> tuple[torch.Tensor, torch.Tensor]:
    """What both compute: out [T, H, D], lse [H, T]; the mask aligned at the bottom right, +inf for rows without keys.

    Rows are computed one by one in float64, so that their bits depend on nothing else. Masked values are multiplied.
    """
    group = q_THD.shape[1] // k_NBKD.shape[2]
    k_SHD, v_SHD = (
        x[table.long()].flatten(0, 1)[:num_keys].double().repeat_interleave(group, 1) for x in (k_NBKD, v_NBKD)
    )
    out, lse = torch.empty_like(q_THD), torch.empty(q_THD.shape[1], len(q_THD))
    for t, q_HD in enumerate(q_THD.double()):
        distance_S = t + num_keys - len(q_THD) - torch.arange(num_keys)
        seen_S = torch.ones(num_keys, dtype=torch.bool)
        if window[1] == 0:
            seen_S &= distance_S >= 0
        if window[0] >= 0:
            seen_S &= distance_S <= window[0]
        score_HS = torch.einsum("hd,shd->hs", q_HD, k_SHD) * scale
        score_HS[:, ~seen_S] = -math.inf
        lse_H = score_HS.logsumexp(-1)
        weight_HS = torch.nan_to_num(torch.exp(score_HS - lse_H[:, None]), 0.0)
        out[t] = torch.einsum("hs,shd->hd", weight_HS, v_SHD).to(out.dtype)
        lse[:, t] = torch.where(lse_H.isneginf(), math.inf, lse_H)
    return out, lse


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """flash-attn 2.6 on: a block table of int32, pages of 256, contiguous queries, lse [H, T]."""
    assert block_table.dtype == cu_seqlens_q.dtype == torch.int32 and k.shape[1] % 256 == 0 and q.is_contiguous()
    assert cu_seqlens_q.tolist() == [0, max_seqlen_q] == [0, len(q)] and cu_seqlens_k.tolist() == [0, max_seqlen_k]
    assert causal == (window_size[1] == 0) and return_attn_probs and max_seqlen_q > 1
    return *paged(q, k, v, block_table[0], max_seqlen_k, softmax_scale, window_size), None


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """torch 2.13: an optional cu_seq_k, the keys in use by `seqused_k`."""
    assert cu_seq_k is None and enable_gqa and num_splits == 1 and return_aux == "lse"
    return paged(query, key, value, block_table[0], int(seqused_k[0]), scale, window_size)


CALLS = {"flash-attn": flash_attn_call(flash_attn_varlen_func), "varlen_attn": varlen_call(varlen_attn, "lse")}


class Watched(TorchBackend):
    """The rest, which notes the rows that it is left."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, int]] = []

    def span_state(self, q_THD, start, span, params) -> AttnState:
        self.rows.append((start, start + len(q_THD)))
        return super().span_state(q_THD.float(), start, span, params)


@pytest.fixture(params=CALLS)
def backend(request) -> FlashBackend:
    return FlashBackend(CALLS[request.param], True, Watched())


def halves(num_tokens: int, block: int = 256, fmt: str = "bf16") -> tuple[Sequence, torch.Tensor]:
    return random_sequence(num_tokens, 2, 16, block_tokens=block, fmt=fmt), torch.randn(num_tokens, 6, 16).bfloat16()


@pytest.mark.parametrize("window", [None, 30, 300])
def test_states_are_those_of_the_torch_backend(backend, window):
    """Causal rows, rows past the span's end, and blocks that slid out, which hold NaN and must not be named (B44)."""
    sequence, q_THD = halves(600)
    params = AttnParams(0.25, window)
    for start, first, end in ((0, 0, 60), (590, 0, 600), (560, 256, 600), (599, 0, 600), (500, 0, 512)):
        table = sequence.view.table.copy()
        if window == 30 and start >= 512 + 30:
            table[:2] = 0
        view = KVView(sequence.view.layer, table)
        expected = TorchBackend().span_state(
            q_THD[start:600].float(), start, Span(sequence.view, first, end - first), params
        )
        got = backend.span_state(q_THD[start:600], start, Span(view, first, end - first), params)
        assert_close(got, expected, 1e-2)
        torch.testing.assert_close(got.lse, expected.lse, atol=1e-5, rtol=1e-5)
        assert got.lse.is_contiguous() and got.out.dtype == torch.float32
    assert backend._rest.rows == ([] if window is None else [(60, 600), (512, 600)])


def test_what_the_libraries_do_not_know_is_left_to_the_rest(backend):
    sequence, q_THD = halves(40)
    for params, length in (
        (AttnParams(1.0, None, 5.0), 40),
        (AttnParams(1.0, 9, None, 2), 2),
        (AttnParams(1.0, None, None, 0, 8), 8),
    ):
        backend.span_state(q_THD[:length], 0, Span(sequence.view, 0, length), params)
    for other in (halves(40, block=16)[0], halves(40, fmt="fp32")[0], halves(40, fmt="int8")[0]):
        backend.span_state(q_THD, 0, Span(other.view, 0, 40), AttnParams(1.0))
    backend.span_state(q_THD.float(), 0, Span(sequence.view, 0, 40), AttnParams(1.0))
    assert len(backend._rest.rows) == 7


def test_a_row_alone_has_the_bits_of_its_chunk(backend):
    sequence, q_THD = halves(70)
    span = Span(sequence.view, 0, 70)
    whole = backend.span_state(q_THD, 0, span, AttnParams(0.25))
    alone = backend.span_state(q_THD[69:], 69, span, AttnParams(0.25))
    assert_same_bits(alone, AttnState(whole.out[69:], whole.lse[69:]))


def answering(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]):
    return lambda *args: change(*paged(*args))


@pytest.mark.parametrize(
    ("change", "heads_first"),
    [
        (lambda out, lse: (out, lse), True),
        (lambda out, lse: (out, lse.T.contiguous()), False),
        (lambda out, lse: (out, lse / math.log(2)), None),
        (lambda out, lse: (out, lse.reshape(-1).view(lse.shape[1], lse.shape[0])), None),
        (lambda out, lse: (out + 0.2, lse), None),
        (lambda out, lse: (out * (1 + len(out) * 1e-4), lse), None),
    ],
    ids=["lse by heads", "lse by tokens", "lse of base 2", "lse scrambled", "other attention", "bits by chunk"],
)
def test_a_library_is_used_if_it_does_what_it_says(change, heads_first):
    """vllm-project/vllm#52796, #22003: bases and layouts are asked of the installed library (B46, B47)."""
    rest = TorchBackend()
    chosen = with_flash(rest, "cpu", [answering(change)])
    if heads_first is None:
        assert chosen is rest
    else:
        assert isinstance(chosen, FlashBackend) and chosen._heads_first is heads_first


def test_a_library_without_a_kernel_for_the_device_is_not_used():
    """torch's own `varlen_attn` refuses CPU tensors."""
    rest = TorchBackend()
    assert with_flash(rest, "cpu") is rest
