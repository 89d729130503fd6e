"""What the Triton attention kernels share: tiles of stored keys and values, and the running softmax over them."""

# Shape legend: M query rows, N keys of one tile, D head dim.
from __future__ import annotations

import triton
import triton.language as tl

# Kinds of stored elements, as constants of a kernel.
EXACT = tl.constexpr(0)
FP8_E4M3 = tl.constexpr(1)
FP8_E5M2 = tl.constexpr(2)
INT8 = tl.constexpr(3)
INT4 = tl.constexpr(4)

NO_WINDOW = 1 << 30
"""Stands for an absent window and for an absent chunk: larger than any position."""


@triton.jit
def _int4_columns(DIM: tl.constexpr, PAD: tl.constexpr):
    """The elements of byte i's lower [PAD/2] and upper half [PAD/2], and whether there is such a byte.

    Byte i of a group of E elements holds element i in its lower half and element i + E/2 in its upper one. A tile has
    the two halves of a byte side by side, so that no thread needs another's.
    """
    byte_C = tl.arange(0, PAD // 2)
    lower_C = byte_C + byte_C // 32 * 32
    return lower_C, lower_C + tl.minimum(DIM - byte_C // 32 * 64, 64) // 2, byte_C < DIM // 2


@triton.jit
def load_rows(row_M, wanted_M, KIND: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr):
    """Vectors [M, PAD] from pointers to their starts, columns ordered as in a tile of this kind, zeros where none."""
    if KIND == INT4:
        lower_C, upper_C, is_C = _int4_columns(DIM, PAD)
        mask_MC = wanted_M[:, None] & is_C[None, :]
        lower_MC = tl.load(row_M[:, None] + lower_C[None, :], mask=mask_MC, other=0.0)
        upper_MC = tl.load(row_M[:, None] + upper_C[None, :], mask=mask_MC, other=0.0)
        return tl.reshape(tl.join(lower_MC, upper_MC), [row_M.shape[0], PAD])
    else:
        d_D = tl.arange(0, PAD)
        return tl.load(row_M[:, None] + d_D[None, :], mask=wanted_M[:, None] & (d_D < DIM)[None, :], other=0.0)


@triton.jit
def store_rows(row_M, x_MD, wanted_M, KIND: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr):
    """Write vectors whose columns are ordered as in a tile of this kind to pointers to their starts."""
    if KIND == INT4:
        lower_C, upper_C, is_C = _int4_columns(DIM, PAD)
        mask_MC = wanted_M[:, None] & is_C[None, :]
        lower_MC, upper_MC = tl.split(tl.reshape(x_MD, [row_M.shape[0], PAD // 2, 2]))
        tl.store(row_M[:, None] + lower_C[None, :], lower_MC, mask=mask_MC)
        tl.store(row_M[:, None] + upper_C[None, :], upper_MC, mask=mask_MC)
    else:
        d_D = tl.arange(0, PAD)
        tl.store(row_M[:, None] + d_D[None, :], x_MD, mask=wanted_M[:, None] & (d_D < DIM)[None, :])


@triton.jit
def row_pointers(data, table, n0, live_N, slot_stride, ROW: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the rows of keys n0 .. n0+N-1 begin [N], `ROW` elements each."""
    if PAGE % BLOCK_N == 0:
        # A tile lies in one block: one look-up, and what differs between rows is known to the compiler.
        slot = tl.load(table + n0 // PAGE).to(tl.int64)
        return data + (slot * slot_stride + n0 % PAGE * ROW) + tl.arange(0, BLOCK_N) * ROW
    else:
        n_N = n0 + tl.arange(0, BLOCK_N)
        slot_N = tl.load(table + n_N // PAGE, mask=live_N, other=0).to(tl.int64)
        return data + slot_N * slot_stride + n_N % PAGE * ROW


@triton.jit
def load_tile(
    data,
    scales,
    table,
    n0,
    live_N,
    slot_stride,
    scale_slot_stride,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys or values n0 .. n0+N-1 as [N, PAD] in COMPUTE, and the scale [N] that they are still to be multiplied by.

    Column d is element `element_of(d)`.

    `data` and `scales` point at the kv head's first row of slot 0. Codes of one scale per vector are handed out as they
    are: bf16 and fp16 hold every one exactly, and the product is scaled instead. Keys that are not live are not read.
    Columns are ordered as `load_rows` orders them.
    """
    if KIND == INT4:
        byte_C = tl.arange(0, PAD // 2)
        row_N = row_pointers(data, table, n0, live_N, slot_stride, DIM // 2, PAGE, BLOCK_N)
        mask_NC = live_N[:, None] & (byte_C < DIM // 2)[None, :]
        packed_NC = tl.load(row_N[:, None] + byte_C[None, :], mask=mask_NC, other=0)
        num_groups: tl.constexpr = (DIM + 63) // 64
        groups: tl.constexpr = (PAD + 63) // 64
        group_G = tl.arange(0, groups)
        scale_N = row_pointers(scales, table, n0, live_N, scale_slot_stride, 2 * num_groups, PAGE, BLOCK_N)
        scale_NG = scale_N[:, None] + 2 * group_G[None, :]
        mask_NG = live_N[:, None] & (group_G < num_groups)[None, :]
        step_NC = tl.load(scale_NG, mask=mask_NG, other=0.0).to(tl.float32)
        low_NC = tl.load(scale_NG + 1, mask=mask_NG, other=0.0).to(tl.float32)
        if groups > 1:
            step_NC = tl.reshape(tl.broadcast_to(step_NC[:, :, None], [BLOCK_N, groups, 32]), [BLOCK_N, PAD // 2])
            low_NC = tl.reshape(tl.broadcast_to(low_NC[:, :, None], [BLOCK_N, groups, 32]), [BLOCK_N, PAD // 2])
        first_NC = ((packed_NC & 15).to(tl.float32) * step_NC + low_NC).to(COMPUTE)
        second_NC = ((packed_NC >> 4).to(tl.float32) * step_NC + low_NC).to(COMPUTE)
        return tl.reshape(tl.join(first_NC, second_NC), [BLOCK_N, PAD]), 1.0
    else:
        d_D = tl.arange(0, PAD)
        row_N = row_pointers(data, table, n0, live_N, slot_stride, DIM, PAGE, BLOCK_N)
        at_ND = row_N[:, None] + d_D[None, :]
        if MASKED or PAD != DIM:
            stored_ND = tl.load(at_ND, mask=live_N[:, None] & (d_D < DIM)[None, :], other=0)
        else:
            stored_ND = tl.load(at_ND)
        if KIND == EXACT:
            return stored_ND.to(COMPUTE), 1.0
        else:
            scale_at_N = row_pointers(scales, table, n0, live_N, scale_slot_stride, 1, PAGE, BLOCK_N)
            scale_N = tl.load(scale_at_N, mask=live_N, other=0.0)
            if KIND == FP8_E5M2:
                # The upper byte of an fp16.
                return (stored_ND.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(COMPUTE), scale_N
            elif KIND == FP8_E4M3:
                # An fp16's bits but for the exponent's bias: smaller by 2 ** 8, subnormals included.
                bits_ND = ((stored_ND & 0x80).to(tl.uint16) << 8) | ((stored_ND & 0x7F).to(tl.uint16) << 7)
                return bits_ND.to(tl.float16, bitcast=True).to(COMPUTE), scale_N * 256.0
            else:
                return stored_ND.to(COMPUTE), scale_N


@triton.jit
def capped(product_MN, score_scale, cap, SOFTCAP: tl.constexpr):
    """Scores in units of log2: the product times `score_scale`, or under a soft-cap `cap` times its tanh."""
    score_MN = product_MN * score_scale
    if SOFTCAP:
        shrunk_MN = tl.exp(-2.0 * tl.abs(score_MN))
        tanh_MN = (1.0 - shrunk_MN) / (1.0 + shrunk_MN)
        score_MN = tl.where(score_MN < 0, -tanh_MN, tanh_MN) * cap
    return score_MN


@triton.jit
def fold(
    score_MN,
    v_ND,
    v_scale_N,
    top_M,
    total_M,
    out_MD,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One more tile in the running softmax: (top, total, out), out not yet divided; scores in units of log2.

    A tile that is hidden from a row leaves its bits as they were.
    """
    new_top_M = tl.maximum(top_M, tl.max(score_MN, 1))
    # Where a row has seen nothing yet, any finite stand-in for -inf gives weights of exactly 0.
    finite_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
    weight_MN = tl.exp2(score_MN - finite_M[:, None])
    shrink_M = tl.exp2(top_M - finite_M)
    total_M = total_M * shrink_M + tl.sum(weight_MN, 1)
    out_MD = out_MD * shrink_M[:, None]
    if KIND != EXACT and KIND != INT4:
        if tl.float16 == COMPUTE:
            # A weight times a scale may be too small for fp16, a value is not.
            v_ND = (v_ND.to(tl.float32) * v_scale_N[:, None]).to(COMPUTE)
        else:
            weight_MN *= v_scale_N[None, :]
    out_MD = tl.dot(weight_MN.to(COMPUTE), v_ND, out_MD, input_precision=PRECISION)
    return new_top_M, total_M, out_MD


@triton.jit
def first_visible(position, window, local_chunk):
    """The first key that a query at `position` sees, but for sinks."""
    return tl.maximum(tl.maximum(position - window + 1, position // local_chunk * local_chunk), 0)
