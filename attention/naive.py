"""Attention in float64 exactly as defined: the oracle that every backend is compared with."""

# Shape legend: T query tokens, S keys, H query heads, K kv heads, D head dim.
from __future__ import annotations

import math

import torch

from longctx.attention.span import AttnParams
from longctx.attention.state import AttnState


def naive_state(
    q_THD: torch.Tensor,
    positions_T: torch.Tensor,
    k_KSD: torch.Tensor,
    v_KSD: torch.Tensor,
    first_key: int,
    params: AttnParams,
) -> AttnState:
    """State in float64 of queries at `positions_T` over keys at positions first_key .. first_key+S-1.

    `AttnParams` says which keys a query sees; keys that no query sees are not read.
    """
    num_tokens, num_heads, _ = q_THD.shape
    group = num_heads // k_KSD.shape[0]
    key_S = first_key + torch.arange(k_KSD.shape[1], device=q_THD.device)
    distance_TS = positions_T[:, None] - key_S[None, :]
    seen_TS = distance_TS >= 0
    if params.window is not None:
        seen_TS &= (distance_TS < params.window) | (key_S < params.sinks)
    if params.local_chunk is not None:
        seen_TS &= positions_T[:, None] // params.local_chunk == key_S // params.local_chunk
    used_S = seen_TS.any(0)
    seen_TS = seen_TS[:, used_S]
    if seen_TS.shape[1] == 0:
        out = torch.zeros(num_tokens, num_heads, v_KSD.shape[2], dtype=torch.float64, device=q_THD.device)
        return AttnState(out, torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64, device=q_THD.device))
    k_HSD, v_HSD = (x[:, used_S].double().repeat_interleave(group, 0) for x in (k_KSD, v_KSD))
    scores_HTS = torch.einsum("thd,hsd->hts", q_THD.double(), k_HSD) * params.scale
    if params.softcap is not None:
        scores_HTS = params.softcap * torch.tanh(scores_HTS / params.softcap)
    scores_HTS = scores_HTS.masked_fill(~seen_TS, -math.inf)
    lse_HT = torch.logsumexp(scores_HTS, -1)
    weights_HTS = torch.exp(scores_HTS - torch.where(lse_HT.isneginf(), 0.0, lse_HT).unsqueeze(-1))
    return AttnState(torch.einsum("hts,hsd->thd", weights_HTS, v_HSD), lse_HT.T.contiguous())
