"""Swaps the small modules of a loaded model for faster ones, where a trial shows that they compute the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from longctx.models.fused_attention import ATTENTIONS, PROBE_TOKENS, FusedAttention, probe
from longctx.models.fused_rows import (
    ACTIVATIONS,
    GATED_MLPS,
    NORMS,
    FusedMLP,
    FusedRMSNorm,
    Int8MLP,
    activation_name,
    fuse_mlp,
)
from longctx.models.int8_linears import Int8Linear
from longctx.models.linears import PackedLinear

_TRIAL_ROWS = PROBE_TOKENS
_FEWER_ROWS = (1, 2, 3, 5, 8)
_TRIAL_TOLERANCE = 1e-5
_INT8_TOLERANCE = 0.02
"""Rounding may tip a value to the next code, which is 1/127 of its group's largest."""

Fused = FusedAttention | FusedMLP | Int8MLP | FusedRMSNorm


@dataclass(frozen=True)
class FuseReport:
    """How many modules of each class were replaced, and why those of other known classes were not."""

    fused: dict[str, int]
    left: dict[str, str] = field(default_factory=dict)


def fuse(model: PreTrainedModel) -> FuseReport:
    """Replace attention modules, gated MLPs and norms of the classes known here; unknown classes stay.

    Call it after `pack_linears`: without packed linears only norms are replaced. The first replacement of each shape
    is compared with the module it stands for on random rows, and its rows must not depend on their number; else that
    class stays as it is.
    """
    fused: Counter[str] = Counter()
    left: dict[str, str] = {}
    agreed: set[str] = set()
    # Attention first: it takes in the norms of its heads, which must still be the source's own.
    for kinds, build in ((ATTENTIONS, FusedAttention), (GATED_MLPS, fuse_mlp), (NORMS, FusedRMSNorm)):
        for name, module in list(model.named_modules()):
            kind = type(module).__name__
            if kind not in kinds or kind in left:
                continue
            if reason := _replace(model, name, build, agreed):
                left[kind] = reason
            else:
                fused[kind] += 1
    return FuseReport(dict(fused), left)


@torch.no_grad()
def _replace(model: PreTrainedModel, name: str, build: Callable[[nn.Module], Fused], agreed: set[str]) -> str:
    """Put a replacement in the place of a module; the reason if that cannot be."""
    owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    module = getattr(owner, leaf)
    if reason := _unsuited(module):
        return reason
    replacement = build(module).train(module.training)
    shape = type(module).__name__ + repr(replacement)
    if shape not in agreed:
        trial = _attention_trial if isinstance(replacement, FusedAttention) else _trial
        if reason := trial(module, replacement):
            return reason
        agreed.add(shape)
    setattr(owner, leaf, replacement)
    return ""


def _unsuited(module: nn.Module) -> str:
    """Why a module of a known class cannot be replaced; empty when it can."""
    for parameter in module.parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            return f"needs fp32 on the CPU, not {parameter.dtype} on {parameter.device}"
    kind = type(module).__name__
    linears = [child for child in module.children() if hasattr(child, "in_features") and kind not in NORMS]
    if not any(all(isinstance(linear, kind) for linear in linears) for kind in (PackedLinear, Int8Linear)):
        return "its linears are not packed"
    if kind in GATED_MLPS and activation_name(module) not in ACTIVATIONS:
        return f"activation {activation_name(module)} is not known"
    return ""


def _trial(module: nn.Module, replacement: Fused) -> str:
    """What sets the replacement apart from the module, beyond rounding, on random rows."""
    x = torch.randn(_TRIAL_ROWS, replacement.in_features, generator=torch.Generator().manual_seed(0))
    ours = replacement(x)
    if not _close(ours, module(x), _tolerance(replacement)):
        return "a trial gave other values"
    if not all(torch.equal(replacement(x[:rows]), ours[:rows]) for rows in _FEWER_ROWS):
        return "in a trial rows depended on their number"
    return ""


def _attention_trial(module: nn.Module, replacement: Fused) -> str:
    theirs, their_settings = probe(module, _TRIAL_ROWS)
    ours, our_settings = probe(replacement, _TRIAL_ROWS)
    tolerance = _tolerance(replacement)
    if our_settings != their_settings or not all(_close(a, b, tolerance) for a, b in zip(ours, theirs, strict=True)):
        return "a trial gave other values"
    for rows in _FEWER_ROWS:
        *heads, out = probe(replacement, rows)[0]
        pairs = [*zip(heads, (tensor[:, :, :rows] for tensor in ours), strict=False), (out, ours[-1][:, :rows])]
        if not all(torch.equal(a, b) for a, b in pairs):
            return "in a trial rows depended on their number"
    return ""


def _tolerance(replacement: nn.Module) -> float:
    return _INT8_TOLERANCE if any(isinstance(m, Int8Linear) for m in replacement.modules()) else _TRIAL_TOLERANCE


def _close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))
