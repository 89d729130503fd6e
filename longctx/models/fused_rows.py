"""Norms and gated MLPs in fewer passes over their rows (CPU, fp32)."""

# Shape legend: N rows, I in features, D row length.
from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from longctx.models.int8_kernel import GELU_TANH, SILU
from longctx.models.int8_linears import Int8Linear, join_linears
from longctx.models.linears import MIN_ROWS, PackedLinear, pad_rows
from longctx.models.row_kernels import rms_norm_rows

_LLAMA_LIKE = ("Llama", "Qwen2", "Qwen3", "Mistral", "SmolLM3", "Granite", "Olmo2", "Qwen3Moe")
PLAIN_NORMS = frozenset(f"{family}RMSNorm" for family in (*_LLAMA_LIKE, "Phi3", "Mixtral", "GptOss"))
OFFSET_NORMS = frozenset({"Gemma2RMSNorm", "Gemma3RMSNorm"})
"""These scale by 1 + weight."""
NORMS = PLAIN_NORMS | OFFSET_NORMS
GATED_MLPS = frozenset(f"{family}MLP" for family in (*_LLAMA_LIKE, "Gemma2", "Gemma3"))

ACTIVATIONS = {"silu": ("swish", ""), "gelu_pytorch_tanh": ("gelu", "tanh")}
"""Those that oneDNN computes inside a product, by its names for them."""
_INT8_ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}


def norm_scale(norm: nn.Module) -> tuple[np.ndarray, float]:
    """What a norm of a known class multiplies by [D], and its eps."""
    weight: Any = norm.weight
    is_offset = type(norm).__name__ in OFFSET_NORMS
    scale_D = weight.detach() + 1.0 if is_offset else weight.detach()
    return np.ascontiguousarray(scale_D.numpy()), float(norm.eps if is_offset else norm.variance_epsilon)  # type: ignore[arg-type]


def activation_name(mlp: nn.Module) -> str:
    """The name by which a gated MLP's config calls its activation."""
    config: Any = mlp.config
    return getattr(config, "hidden_activation", None) or config.hidden_act


class FusedRMSNorm(nn.Module):
    """RMS norm in one pass; keeps the source's `weight`. Rows do not depend on each other."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        weight: Any = source.weight
        self.weight = weight
        self.in_features = int(weight.shape[0])
        self._scale_D, self.eps = norm_scale(source)

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
        self._activation, self._algorithm = ACTIVATIONS[activation_name(source)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] to [..., I]."""
        rows = x.numel() // self.gate_proj.in_features
        if rows >= MIN_ROWS:
            return self._rows(x)
        if rows == 0:
            return torch.empty_like(x)
        # Padded once here instead of three times in the linears.
        x_NI = pad_rows(x.reshape(rows, -1)).contiguous()
        return self._rows(x_NI)[:rows].view(x.shape)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj, self.up_proj
        hidden = torch.ops.mkldnn._linear_pointwise.default(
            x, gate.packed, gate.bias, self._activation, [], self._algorithm
        )
        hidden = torch.ops.mkldnn._linear_pointwise.binary(x, hidden, up.packed, up.bias, "mul")
        return self.down_proj(hidden)


class Int8MLP(nn.Module):
    """down(act(gate(x)) * up(x)) on int8 weights: gate and up in one product, the rest of a row as it is quantized."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj = join_linears([source.gate_proj, source.up_proj])  # type: ignore[list-item]
        self.down_proj: Int8Linear = source.down_proj  # type: ignore[assignment]
        self.in_features = self.gate_up_proj.in_features
        self._activation = _INT8_ACTIVATIONS[activation_name(source)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] to [..., I]."""
        return self.down_proj.apply_gated(self.gate_up_proj(x), self._activation)


def fuse_mlp(source: nn.Module) -> FusedMLP | Int8MLP:
    """The replacement of a gated MLP, by what its linears are."""
    return Int8MLP(source) if isinstance(source.down_proj, Int8Linear) else FusedMLP(source)
