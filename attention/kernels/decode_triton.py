"""Paged split-KV decode on a GPU: a kernel over (split of a sequence, kv head), and one that merges a row's splits."""

# Shape legend: R sequences, I items, H query heads, K kv heads, G query heads per kv head, N keys of a tile, D head
# dim.
#
# The keys of a sequence are split at multiples of SPLIT, whatever its length and its batch mates. One item is one split
# of one sequence; a program computes it for all G query heads of a kv head, so that keys and values are read once.
from __future__ import annotations

import triton
import triton.language as tl

from longctx.attention.kernels.tiles_triton import INT4, capped, first_visible, fold, load_rows, load_tile, store_rows


# What changes from step to step is not specialized on: a new value must not compile a new kernel.
@triton.jit(do_not_specialize=["max_blocks", "window", "sinks", "local_chunk"])
def decode_kernel(
    q,
    k,
    v,
    k_scale,
    v_scale,
    tables,
    positions,
    item_row,
    item_split,
    out,
    tops,
    totals,
    max_blocks,
    q_row_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    k_scale_slot_stride,
    k_scale_head_stride,
    v_scale_slot_stride,
    v_scale_head_stride,
    window,
    sinks,
    local_chunk,
    score_scale,
    cap,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Partial states of item and kv head (program ids 0 and 1): out [I, H, Dv] not divided, tops and totals [I, H].

    `tops` are maxima in units of log2. Strides are in elements; rows of a block are contiguous.
    """
    item, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(item_row + item)
    split = tl.load(item_split + item)
    position = tl.load(positions + row).to(tl.int32)
    table = tables + row * max_blocks
    g_M = tl.arange(0, GROUP_PAD)
    head_M = kv_head * GROUP + g_M
    in_group_M = g_M < GROUP
    q_at_M = q + row * q_row_stride + head_M * q_head_stride
    q_MD = load_rows(q_at_M, in_group_M, K_KIND, K_DIM, K_PAD).to(COMPUTE)
    k += kv_head * k_head_stride
    v += kv_head * v_head_stride
    if k_scale is not None:
        k_scale += kv_head * k_scale_head_stride
    if v_scale is not None:
        v_scale += kv_head * v_scale_head_stride

    first = first_visible(position, window, local_chunk)
    split_first = (split * SPLIT).to(tl.int32)
    begin = tl.where(split_first < sinks, split_first, tl.maximum(split_first, first // BLOCK_N * BLOCK_N))
    end = tl.minimum(split_first + SPLIT, position + 1)
    top_M = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total_M = tl.zeros([GROUP_PAD], tl.float32)
    out_MD = tl.zeros([GROUP_PAD, V_PAD], tl.float32)
    for n0 in range(begin, end, BLOCK_N):
        n_N = n0 + tl.arange(0, BLOCK_N)
        seen_N = (n_N < end) & ((n_N >= first) | (n_N < sinks))
        k_ND, k_scale_N = load_tile(
            k, k_scale, table, n0, seen_N, k_slot_stride, k_scale_slot_stride,
            K_KIND, K_DIM, K_PAD, PAGE, BLOCK_N, COMPUTE, True,
        )  # fmt: skip
        product_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
        if k_scale is not None and K_KIND != INT4:
            product_MN *= k_scale_N[None, :]
        score_MN = tl.where(seen_N[None, :], capped(product_MN, score_scale, cap, SOFTCAP), float("-inf"))
        v_ND, v_scale_N = load_tile(
            v, v_scale, table, n0, seen_N, v_slot_stride, v_scale_slot_stride,
            V_KIND, V_DIM, V_PAD, PAGE, BLOCK_N, COMPUTE, True,
        )  # fmt: skip
        top_M, total_M, out_MD = fold(score_MN, v_ND, v_scale_N, top_M, total_M, out_MD, V_KIND, COMPUTE, PRECISION)

    at_M = item.to(tl.int64) * tl.num_programs(1) * GROUP + head_M
    store_rows(out + at_M * V_DIM, out_MD, in_group_M, V_KIND, V_DIM, V_PAD)
    tl.store(tops + at_M, top_M, mask=in_group_M)
    tl.store(totals + at_M, total_M, mask=in_group_M)


@triton.jit
def merge_splits_kernel(
    partial,
    tops,
    totals,
    row_items,
    out,
    lse,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """The state of row and query head (program ids 0 and 1): its items' partial states, merged in ascending order."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1)
    begin, end = tl.load(row_items + row), tl.load(row_items + row + 1)
    d_D = tl.arange(0, V_PAD)
    top = float("-inf")
    total = 0.0
    out_D = tl.zeros([V_PAD], tl.float32)
    for i0 in range(begin, end, BLOCK_I):
        i_I = i0 + tl.arange(0, BLOCK_I)
        at_I = i_I.to(tl.int64) * num_heads + head
        top_I = tl.load(tops + at_I, mask=i_I < end, other=float("-inf"))
        total_I = tl.load(totals + at_I, mask=i_I < end, other=0.0)
        part_ID = tl.load(
            partial + at_I[:, None] * V_DIM + d_D[None, :],
            mask=(i_I < end)[:, None] & (d_D < V_DIM)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(top_I, 0))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight_I = tl.exp2(top_I - finite)
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(weight_I * total_I, 0)
        out_D = out_D * shrink + tl.sum(weight_I[:, None] * part_ID, 0)
        top = new_top
    at = row * num_heads + head
    empty = total == 0.0
    tl.store(out + at * V_DIM + d_D, out_D / tl.where(empty, 1.0, total), mask=d_D < V_DIM)
    # log2 to natural logarithms.
    log_total = (top + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453
    tl.store(lse + at, tl.where(empty, float("-inf"), log_total))
