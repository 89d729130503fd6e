"""Masked attention over contiguous keys with torch's operators: the fused CPU one, and matrix products for the rest."""

# Shape legend: T query tokens, S keys, H query heads, K kv heads, G query heads per kv head, D head dim.
from __future__ import annotations

from functools import cache

import torch

from longctx.attention.span import AttnParams


def flash_usable(q_HTD: torch.Tensor, k_KSD: torch.Tensor, v_KSD: torch.Tensor, params: AttnParams) -> bool:
    """Whether `flash` computes this: fp32 on a CPU, one head dim for K and V, no soft-cap."""
    return (
        params.softcap is None
        and q_HTD.device.type == "cpu"
        and q_HTD.dtype == k_KSD.dtype == torch.float32
        and k_KSD.shape[2] == v_KSD.shape[2]
        and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    )


def flash(
    q_HTD: torch.Tensor, k_KSD: torch.Tensor, v_KSD: torch.Tensor, mask_TS: torch.Tensor | None, params: AttnParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, D], lse [T, H]) by torch's fused CPU kernel. A row that sees no key is not meaningful."""
    if k_KSD.shape[0] != q_HTD.shape[0] and not _flash_shares_kv_heads():
        group = q_HTD.shape[0] // k_KSD.shape[0]
        k_KSD, v_KSD = k_KSD.repeat_interleave(group, 0), v_KSD.repeat_interleave(group, 0)
    out_1HTD, lse_1HT = _flash_op(q_HTD[None], k_KSD[None], v_KSD[None], mask_TS, params.scale)
    return out_1HTD[0].transpose(0, 1), lse_1HT[0].transpose(0, 1)


def _flash_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)


@cache
def _flash_shares_kv_heads() -> bool:
    """Whether the fused kernel maps several query heads to one kv head by itself.

    A kernel that does not would read the second head behind the first: here that is memory we own, with other keys.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 16, generator=generator) for _ in range(3))
    try:
        shared, _ = _flash_op(q, k[:, :1], v[:, :1], None, 0.25)
    except RuntimeError:
        return False
    expected, _ = _flash_op(q, k[:, :1].repeat(1, 2, 1, 1), v[:, :1].repeat(1, 2, 1, 1), None, 0.25)
    return torch.equal(shared, expected)


def explicit(
    q_HTD: torch.Tensor, k_KSD: torch.Tensor, v_KSD: torch.Tensor, mask_TS: torch.Tensor | None, params: AttnParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, Dv] fp32, lse [T, H]) by matrix products in fp32: any device and dtype, soft-cap, Dk unlike Dv.

    A row that sees no key is not meaningful. Holds the scores of all rows at once: cut the queries before.
    """
    num_heads, num_rows, _ = q_HTD.shape
    num_kv_heads, _, v_dim = v_KSD.shape
    q_KGTD = q_HTD.float().unflatten(0, (num_kv_heads, -1))
    scores = torch.matmul(q_KGTD, k_KSD.float().transpose(1, 2).unsqueeze(1)).mul_(params.scale)
    if params.softcap is not None:
        scores = scores.div_(params.softcap).tanh_().mul_(params.softcap)
    if mask_TS is not None:
        scores += mask_TS
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights, v_KSD.float().unsqueeze(1)).div_(total)
    lse = top.add_(total.log_()).reshape(num_heads, num_rows)
    return out.reshape(num_heads, num_rows, v_dim).transpose(0, 1), lse.transpose(0, 1)
