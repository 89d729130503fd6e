"""Faster stand-ins for the small modules of a loaded model (CPU, fp32): norms and gated MLPs."""

# Shape legend: N rows, I in features, M intermediate, D row length.
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from longctx.models.linears import MIN_ROWS, PackedLinear
from longctx.models.row_kernels import rms_norm_rows

_LLAMA_LIKE = ("Llama", "Qwen2", "Qwen3", "Mistral", "SmolLM3", "Granite", "Olmo2", "Qwen3Moe")
PLAIN_NORMS = frozenset(f"{family}RMSNorm" for family in (*_LLAMA_LIKE, "Phi3", "Mixtral", "GptOss"))
OFFSET_NORMS = frozenset({"Gemma2RMSNorm", "Gemma3RMSNorm"})
"""These scale by 1 + weight."""
GATED_MLPS = frozenset(f"{family}MLP" for family in (*_LLAMA_LIKE, "Gemma2", "Gemma3"))

_ACTIVATIONS = {"silu": ("swish", ""), "gelu_pytorch_tanh": ("gelu", "tanh")}
_TRIAL_ROWS = 9
_TRIAL_TOLERANCE = 1e-5


@dataclass(frozen=True)
class FuseReport:
    """How many modules of each class were replaced, and why others of the allowed classes were not."""

    fused: dict[str, int]
    left: dict[str, str] = field(default_factory=dict)


class FusedRMSNorm(nn.Module):
    """RMS norm in one pass; keeps the source's `weight`. Rows do not depend on each other."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        weight: Any = source.weight
        self.weight = weight
        self.in_features = int(weight.shape[0])
        is_offset = type(source).__name__ in OFFSET_NORMS
        self.eps = float(source.eps if is_offset else source.variance_epsilon)  # type: ignore[arg-type]
        self._scale_D = np.ascontiguousarray((weight.detach() + 1.0 if is_offset else weight.detach()).numpy())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] to [..., D]."""
        if x.ndim == 4 and not x.is_contiguous():
            # Heads arrive as a transposed view of token-major rows: normalize those in place of a copy.
            return self._rows(x.transpose(1, 2).contiguous()).transpose(1, 2)
        return self._rows(x.contiguous())

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        rms_norm_rows(
            x.view(-1, self.in_features).numpy(), self._scale_D, self.eps, out.view(-1, self.in_features).numpy()
        )
        return out

    def extra_repr(self) -> str:
        return f"{self.in_features}, eps={self.eps}"


class FusedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with the activation and the product inside oneDNN's matrix products."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.gate_proj: PackedLinear = source.gate_proj  # type: ignore[assignment]
        self.up_proj: PackedLinear = source.up_proj  # type: ignore[assignment]
        self.down_proj: PackedLinear = source.down_proj  # type: ignore[assignment]
        self.in_features = self.gate_proj.in_features
        self._activation, self._algorithm = _ACTIVATIONS[_activation_name(source)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] to [..., I]."""
        rows = x.numel() // self.gate_proj.in_features
        if rows >= MIN_ROWS:
            return self._rows(x)
        if rows == 0:
            return torch.empty_like(x)
        # Padded once here instead of three times in the linears.
        x_NI = x.reshape(rows, -1)
        x_NI = x_NI.expand(MIN_ROWS, -1).contiguous() if rows == 1 else F.pad(x_NI, (0, 0, 0, MIN_ROWS - rows))
        return self._rows(x_NI)[:rows].view(x.shape)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj, self.up_proj
        hidden = torch.ops.mkldnn._linear_pointwise(x, gate.packed, gate.bias, self._activation, [], self._algorithm)
        hidden = torch.ops.mkldnn._linear_pointwise.binary(x, hidden, up.packed, up.bias, "mul")
        return self.down_proj(hidden)


Fused = FusedRMSNorm | FusedMLP

_BUILDERS: dict[str, Callable[[nn.Module], Fused]] = {
    **dict.fromkeys(PLAIN_NORMS | OFFSET_NORMS, FusedRMSNorm),
    **dict.fromkeys(GATED_MLPS, FusedMLP),
}


def fuse(model: PreTrainedModel) -> FuseReport:
    """Replace modules of the classes known here where a trial on random rows agrees with the module itself.

    Call it after `pack_linears`: MLPs whose linears are not packed stay as they are, as does every unknown class.
    """
    fused: Counter[str] = Counter()
    left: dict[str, str] = {}
    agreed: set[str] = set()
    for name, module in list(model.named_modules()):
        kind = type(module).__name__
        if kind not in _BUILDERS or kind in left:
            continue
        if reason := _unsuited(module):
            left[kind] = reason
            continue
        replacement = _BUILDERS[kind](module)
        signature = kind + repr(module)  # shapes and settings, so that equal layers are tried once
        if signature not in agreed:
            if reason := _trial(module, replacement):
                left[kind] = reason
                continue
            agreed.add(signature)
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], replacement)
        fused[kind] += 1
    return FuseReport(dict(fused), left)


def _unsuited(module: nn.Module) -> str:
    """Why a module of a known class cannot be replaced; empty when it can."""
    for parameter in module.parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            return f"needs fp32 on the CPU, not {parameter.dtype} on {parameter.device}"
    if type(module).__name__ in GATED_MLPS:
        if not all(isinstance(linear, PackedLinear) for linear in module.children() if hasattr(linear, "in_features")):
            return "its linears are not packed"
        if _activation_name(module) not in _ACTIVATIONS:
            return f"activation {_activation_name(module)} is not known"
    return ""


def _activation_name(mlp: nn.Module) -> str:
    config: Any = mlp.config
    return getattr(config, "hidden_activation", None) or config.hidden_act


@torch.no_grad()
def _trial(module: nn.Module, replacement: Fused) -> str:
    """What sets the replacement apart from the module, beyond rounding, on a few random rows."""
    x = torch.randn(_TRIAL_ROWS, replacement.in_features, generator=torch.Generator().manual_seed(0))
    expected, ours = module(x), replacement(x)
    if not torch.allclose(ours, expected, rtol=0, atol=_TRIAL_TOLERANCE * float(expected.abs().max())):
        return "a trial gave other values"
    if not all(torch.equal(replacement(x[:rows]), ours[:rows]) for rows in range(1, _TRIAL_ROWS)):
        return "in a trial rows depended on their number"
    return ""
