"""CPU linears on weights packed by oneDNN: faster than the default, and no row depends on the number of rows."""

# Shape legend: N rows, I in features, O out features.
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from longctx.models.mapped import drop_pages

MIN_ROWS = 4
"""Fewer rows take another kernel with other roundings; four cost no more than one, for the weights are read once."""

_PACKED_FOR_ROWS = 512
_TRIAL_ROWS = (1, 2, 3, 5, 7, 16, 33, 130, 257)
_TRIAL_OUTPUTS = 512


@dataclass(frozen=True)
class PackReport:
    """What `pack_linears` did: linears packed, linears left as they are, and why."""

    packed: int
    plain: int
    reason: str


class PackedLinear(nn.Module):
    """`nn.Linear` on a weight in oneDNN's own layout (fp32, CPU).

    Promises: every row of the answer is the same, bit for bit, whatever other rows there are. Owns the packed weight,
    which is no parameter (an opaque tensor can be neither cast nor saved); the dense weight is not kept.
    """

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.bias = bias_O
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), _PACKED_FOR_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] to [..., O]."""
        rows = x.numel() // self.in_features
        if rows >= MIN_ROWS:
            return _linear(x, self.packed, self.bias)
        leading = x.shape[:-1]
        if rows == 0:
            return x.new_empty((*leading, self.out_features))
        x_NI = pad_rows(x.reshape(rows, self.in_features))
        return _linear(x_NI, self.packed, self.bias)[:rows].view(*leading, self.out_features)

    def dense(self) -> torch.Tensor:
        """A copy of the weight [O, I] in the usual layout."""
        return self.packed.to_dense()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pad_rows(x_NI: torch.Tensor) -> torch.Tensor:
    """1 to 3 rows as `MIN_ROWS`; what stands in the added ones does not matter."""
    if len(x_NI) == 1:
        return x_NI.expand(MIN_ROWS, -1)  # a view, where zeros would be a copy
    return F.pad(x_NI, (0, 0, 0, MIN_ROWS - len(x_NI)))


def pack_linears(model: PreTrainedModel) -> PackReport:
    """Replace every `nn.Linear` of `model`, the LM head included, by a `PackedLinear`, freeing the dense weights.

    A weight shared with the input embedding stays there for look-ups (memory-mapped, only the rows in use are
    resident) and is packed in addition. Expert weights held as one 3-D parameter, quantized and subclassed linears are
    left alone. Without the operators, on another device or dtype, or when a trial at the model's own shapes is wrong or
    depends on the number of rows, nothing is changed and the report says why.
    """
    types = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    todo = [name for name, kind in types.items() if kind is nn.Linear]
    reason = _unsuited([model.get_submodule(name) for name in todo])  # type: ignore[misc]
    if reason:
        return PackReport(0, len(types), reason)
    for name in todo:
        _pack(model, name)
    return PackReport(len(todo), len(types) - len(todo), left_alone(model, types.values()))


def left_alone(model: PreTrainedModel, kinds: Iterable[type]) -> str:
    """What of a model's weights is not replaced, given the classes of its linears; empty if all are."""
    others = sorted({kind.__name__ for kind in kinds if kind is not nn.Linear})
    reasons = [f"{', '.join(others)} left alone"] if others else []
    if num_experts := sum(parameter.ndim == 3 for parameter in model.parameters()):
        reasons.append(f"{num_experts} expert weights are no linears and stay as they are")
    return "; ".join(reasons)


def _pack(model: PreTrainedModel, name: str) -> None:
    """Swap one linear; the dense weight goes when this returns, so that never two copies of a model are held."""
    owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    linear = getattr(owner, leaf)
    setattr(owner, leaf, PackedLinear(linear.weight, None if linear.bias is None else linear.bias.detach()))
    drop_pages(linear.weight)


def _linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def _unsuited(linears: list[nn.Linear]) -> str:
    """Why these linears cannot be packed; empty when they can."""
    for name in ("_reorder_linear_weight", "_linear_pointwise"):
        if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, name)):
            return f"this torch has no mkldnn.{name}"
    for linear in linears:
        if linear.weight.device.type != "cpu" or linear.weight.dtype != torch.float32:
            return f"packing needs fp32 on the CPU, not {linear.weight.dtype} on {linear.weight.device}"
    shapes = {(linear.in_features, min(linear.out_features, _TRIAL_OUTPUTS)) for linear in linears}
    for in_features, out_features in sorted(shapes):
        if fault := _trial(in_features, out_features):
            return fault
    return ""


@torch.no_grad()
def _trial(in_features: int, out_features: int) -> str:
    """Runs one shape (of a wide one only some outputs) and names what is wrong with it."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator)
    x = torch.randn(max(_TRIAL_ROWS), in_features, generator=generator)
    linear = PackedLinear(weight, None)
    whole = linear(x)
    if whole.layout != torch.strided or not torch.allclose(whole, F.linear(x, weight), rtol=1e-4, atol=1e-3):
        return f"packed {in_features} to {out_features} gives wrong values"
    for rows in _TRIAL_ROWS:
        if not torch.equal(linear(x[:rows]), whole[:rows]):
            return f"packed {in_features} to {out_features} depends on the number of rows ({rows})"
    return ""
