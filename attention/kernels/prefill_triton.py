"""Paged prefill on a GPU: one sequence's chunk against a span of its stored keys, tiles cut at absolute positions."""

# Shape legend: T query tokens, H query heads, M query rows of a tile, N keys of a tile, D head dim.
#
# Query tiles begin at multiples of BLOCK_M and key tiles at multiples of BLOCK_N, in absolute positions. Which key
# tiles are computed without a mask is decided for whole query tiles, whatever rows of them are in the chunk: a row's
# arithmetic is a function of its position. Tiles that are hidden from a row change none of its bits.
from __future__ import annotations

import triton
import triton.language as tl

from longctx.attention.kernels.tiles_triton import INT4, capped, first_visible, fold, load_rows, load_tile, store_rows


@triton.jit
def _attend_tile(
    q_MD, m_M, n0, lo, hi, span_start, top_M, total_M, out_MD,
    k, v, k_scale, v_scale, table,
    k_slot_stride, v_slot_stride, k_scale_slot_stride, v_scale_slot_stride,
    window, sinks, local_chunk, score_scale, cap,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_PAD: tl.constexpr, V_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold keys n0 .. n0+N-1 into the state; with MASKED only those in [lo, hi) or below `sinks`, each row its own."""
    n_N = n0 + tl.arange(0, BLOCK_N)
    live_N = (n_N >= span_start) & (n_N < hi) & ((n_N >= lo) | (n_N < sinks))
    k_ND, k_scale_N = load_tile(
        k, k_scale, table, n0, live_N, k_slot_stride, k_scale_slot_stride,
        K_KIND, K_DIM, K_PAD, PAGE, BLOCK_N, COMPUTE, MASKED,
    )  # fmt: skip
    product_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
    if k_scale is not None and K_KIND != INT4:
        product_MN *= k_scale_N[None, :]
    score_MN = capped(product_MN, score_scale, cap, SOFTCAP)
    if MASKED:
        first_M = first_visible(m_M, window, local_chunk)
        seen_MN = (n_N[None, :] >= first_M[:, None]) | (n_N < sinks)[None, :]
        seen_MN &= (n_N[None, :] <= m_M[:, None]) & live_N[None, :]
        score_MN = tl.where(seen_MN, score_MN, float("-inf"))
    v_ND, v_scale_N = load_tile(
        v, v_scale, table, n0, live_N, v_slot_stride, v_scale_slot_stride,
        V_KIND, V_DIM, V_PAD, PAGE, BLOCK_N, COMPUTE, MASKED,
    )  # fmt: skip
    return fold(score_MN, v_ND, v_scale_N, top_M, total_M, out_MD, V_KIND, COMPUTE, PRECISION)


# What changes from step to step is not specialized on: a new value must not compile a new kernel.
@triton.jit(
    do_not_specialize=["start", "num_tokens", "span_start", "span_end", "window", "sinks", "local_chunk"],
)
def prefill_kernel(
    q,
    k,
    v,
    k_scale,
    v_scale,
    table,
    out,
    lse,
    q_token_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    k_scale_slot_stride,
    k_scale_head_stride,
    v_scale_slot_stride,
    v_scale_head_stride,
    start,
    num_tokens,
    span_start,
    span_end,
    window,
    sinks,
    local_chunk,
    score_scale,
    cap,
    GROUP: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """States of query tile and query head (program ids 0 and 1): out [T, H, Dv], lse [T, H] in natural logarithms.

    Queries stand at positions start .. start+T-1, keys at [span_start, span_end) of the block table.
    """
    # The last tiles see the most keys: they begin first.
    m0 = (start // BLOCK_M + tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    m_M = m0 + tl.arange(0, BLOCK_M)
    in_chunk_M = (m_M >= start) & (m_M < start + num_tokens)
    token_M = (m_M - start).to(tl.int64)
    q_at_M = q + token_M * q_token_stride + head * q_head_stride
    q_MD = load_rows(q_at_M, in_chunk_M, K_KIND, K_DIM, K_PAD).to(COMPUTE)
    kv_head = head // GROUP
    k += kv_head * k_head_stride
    v += kv_head * v_head_stride
    if k_scale is not None:
        k_scale += kv_head * k_scale_head_stride
    if v_scale is not None:
        v_scale += kv_head * v_scale_head_stride

    # Keys that some row in the chunk sees, and the tiles that every row of the whole query tile sees entirely.
    lo = tl.maximum(first_visible(tl.maximum(m0, start), window, local_chunk), span_start)
    hi = tl.minimum(tl.minimum(m0 + BLOCK_M, start + num_tokens), span_end)
    sink_first = span_start // BLOCK_N
    sink_tiles = tl.maximum(tl.cdiv(tl.minimum(tl.minimum(sinks, hi), span_end), BLOCK_N) - sink_first, 0)
    tile_lo = tl.maximum(lo // BLOCK_N, sink_first + sink_tiles)
    tile_hi = tl.maximum(tl.cdiv(hi, BLOCK_N), tile_lo)
    whole_lo = tl.cdiv(tl.maximum(first_visible(m0 + BLOCK_M - 1, window, local_chunk), span_start), BLOCK_N)
    whole_lo = tl.minimum(tl.maximum(whole_lo, tile_lo), tile_hi)
    whole_hi = tl.minimum(tl.maximum(tl.minimum(m0 + 1, span_end) // BLOCK_N, whole_lo), tile_hi)

    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    out_MD = tl.zeros([BLOCK_M, V_PAD], tl.float32)
    for tile in range(whole_lo, whole_hi):
        top_M, total_M, out_MD = _attend_tile(
            q_MD, m_M, tile * BLOCK_N, lo, hi, span_start, top_M, total_M, out_MD,
            k, v, k_scale, v_scale, table,
            k_slot_stride, v_slot_stride, k_scale_slot_stride, v_scale_slot_stride,
            window, sinks, local_chunk, score_scale, cap,
            K_KIND, V_KIND, K_DIM, V_DIM, K_PAD, V_PAD, PAGE, BLOCK_N, SOFTCAP, COMPUTE, PRECISION, False,
        )  # fmt: skip
    low_tiles = whole_lo - tile_lo
    for i in range(sink_tiles + low_tiles + tile_hi - whole_hi):
        after_sinks = i - sink_tiles
        tile = tl.where(after_sinks < low_tiles, tile_lo + after_sinks, whole_hi + after_sinks - low_tiles)
        tile = tl.where(after_sinks < 0, sink_first + i, tile)
        top_M, total_M, out_MD = _attend_tile(
            q_MD, m_M, tile * BLOCK_N, lo, hi, span_start, top_M, total_M, out_MD,
            k, v, k_scale, v_scale, table,
            k_slot_stride, v_slot_stride, k_scale_slot_stride, v_scale_slot_stride,
            window, sinks, local_chunk, score_scale, cap,
            K_KIND, V_KIND, K_DIM, V_DIM, K_PAD, V_PAD, PAGE, BLOCK_N, SOFTCAP, COMPUTE, PRECISION, True,
        )  # fmt: skip

    empty_M = total_M == 0.0
    out_MD = out_MD / tl.where(empty_M, 1.0, total_M)[:, None]
    at_M = token_M * tl.num_programs(1) + head
    store_rows(out + at_M * V_DIM, out_MD, in_chunk_M, V_KIND, V_DIM, V_PAD)
    lse_M = tl.where(empty_M, float("-inf"), (top_M + tl.log2(tl.where(empty_M, 1.0, total_M))) * 0.6931471805599453)
    tl.store(lse + at_M, lse_M, mask=in_chunk_M)
