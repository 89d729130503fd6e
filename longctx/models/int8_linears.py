"""CPU linears on int8 weights and dynamically quantized rows: a quarter of the bytes, more than the speed."""

# Shape legend: N rows, I in features, O out features, G groups of inputs.
from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from longctx.attention.kernels.omp import run_on_threads
from longctx.errors import ModelError
from longctx.models.int8_codes import Int8Weight, join, quantize_weight
from longctx.models.int8_kernel import (
    ARGS,
    BLOCK_ROWS,
    LARGEST,
    PLAIN,
    SMALLEST,
    TILE_FLOATS,
    UNIT_BYTES,
    product_kernel,
)
from longctx.models.int8_tile import GROUP, PANEL
from longctx.models.linears import PackReport, left_alone

_TRIAL_ROWS = (1, 2, 3, 5, 7, 33, 130)
_TRIAL_OUTPUTS = 70


class Int8Linear(nn.Module):
    """`nn.Linear` on an int8 weight (CPU, fp32 rows in and out).

    Every row is quantized to int8 by itself, one scale per group of 64 inputs, and multiplied in integers, which are
    exact. Promises: every row of the answer is the same, bit for bit, whatever other rows there are; a row with a
    value that is not finite is NaN. Owns the packed weight, which is no parameter.
    """

    def __init__(self, weight: Int8Weight, bias_O: torch.Tensor | None) -> None:
        super().__init__()
        self.weight_codes, self.bias = weight, bias_O
        self.in_features, self.out_features = weight.in_features, weight.out_features
        panel_bytes = weight.packed[0].numel()
        self._groups, self._few_panels = panel_bytes // (GROUP * PANEL), max(1, UNIT_BYTES // panel_bytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] to [..., O]."""
        return self._apply_kernel(x.contiguous(), PLAIN)

    def apply_gated(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        """The same on act(left half) * right half of x [..., 2 I], which is overwritten; one of int8_kernel's."""
        return self._apply_kernel(x, activation)

    def _apply_kernel(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        assert x.dtype == torch.float32 and x.is_contiguous()
        assert x.shape[-1] == (self.in_features if activation == PLAIN else 2 * self.in_features)
        rows = x.numel() // x.shape[-1]
        out = torch.empty((*x.shape[:-1], self.out_features))
        if rows == 0:
            return out
        threads = torch.get_num_threads()
        code_bytes, group_bytes = rows * self._groups * GROUP, 4 * rows * self._groups
        scratch = torch.empty(code_bytes + 2 * group_bytes + 4 * threads * TILE_FLOATS, dtype=torch.uint8)
        progress, codes, weight = np.zeros(4, np.int64), scratch.data_ptr(), self.weight_codes
        scales = codes + code_bytes
        args = np.array(
            (
                *(rows, self.in_features, self.out_features, self._groups, activation),
                *(self._few_panels if rows <= BLOCK_ROWS else 1, x.data_ptr()),
                *(codes, scales, scales + group_bytes, scales + 2 * group_bytes, progress.ctypes.data),
                *(weight.packed.data_ptr(), weight.scale_O.data_ptr()),
                *(0 if self.bias is None else self.bias.data_ptr(), out.data_ptr()),
            ),
            ARGS,
        )
        run_on_threads(product_kernel(), args.ctypes.data, threads)
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def join_linears(parts: list[Int8Linear]) -> Int8Linear:
    """One linear that gives the outputs of several side by side."""
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts))
    return Int8Linear(join([part.weight_codes for part in parts]), torch.cat(biases) if biases else None)


def quantize_linears(model: PreTrainedModel) -> PackReport:
    """Replace every `nn.Linear` of `model`, the LM head included, by an `Int8Linear`, freeing the dense weights.

    A weight shared with the input embedding stays there for look-ups (memory-mapped, only the rows in use are
    resident). Expert weights held as one 3-D parameter, quantized and subclassed linears are left alone and named.
    Their weights may be stored in any type. Raises `ModelError` and changes nothing where the model does not compute in
    fp32 on a CPU, or a trial gives wrong values.
    """
    types = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    todo = [name for name, kind in types.items() if kind is nn.Linear]
    if model.device.type != "cpu" or model.dtype != torch.float32:
        kind = f"{str(model.dtype).removeprefix('torch.')} on {model.device}"
        raise ModelError(f"--weights int8 is for float32 on a CPU, not {kind}: leave it out")
    linears: list[nn.Linear] = [model.get_submodule(name) for name in todo]  # type: ignore[misc]
    for in_features in sorted({linear.in_features for linear in linears}):
        if fault := _trial(in_features):
            raise ModelError(f"--weights int8 does not work on this machine: {fault}; leave it out")
    for name in todo:
        owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        linear = getattr(owner, leaf)
        bias = None if linear.bias is None else linear.bias.detach()
        setattr(owner, leaf, Int8Linear(quantize_weight(linear.weight), bias))
    return PackReport(len(todo), len(types) - len(todo), left_alone(model, types.values()))


@torch.no_grad()
def _trial(in_features: int) -> str:
    """Runs rows and weights at the ends of their range, where a sum saturates if it can; names what is wrong."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, in_features, generator=generator) for n in (_TRIAL_OUTPUTS, max(_TRIAL_ROWS)))
    weight[:2], x[:2] = torch.tensor([[1.0], [-1.0]]), torch.tensor([[1.0], [-1.0]])
    linear = Int8Linear(quantize_weight(weight), None)
    whole = linear(x)
    expected = round_rows(x).double() @ linear.weight_codes.dense().double().T
    if not torch.allclose(whole.double(), expected, rtol=1e-5, atol=1e-5 * in_features**0.5):
        return f"{in_features} inputs give wrong values"
    if not all(torch.equal(linear(x[:rows]), whole[:rows]) for rows in _TRIAL_ROWS):
        return f"{in_features} inputs depend on the number of rows"
    return ""


def round_rows(x_NI: torch.Tensor) -> torch.Tensor:
    """What a product makes of fp32 rows: each value rounded to its code times its group's scale."""
    padded = F.pad(x_NI, (0, -x_NI.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    top = padded.abs().amax(2, keepdim=True)
    inverse = torch.where(top >= SMALLEST, LARGEST / top, 0.0)
    rounded = (padded * inverse).round() * torch.where(inverse > 0, top / LARGEST, 0.0)
    return torch.where(top.isfinite(), rounded, torch.nan).flatten(1)[:, : x_NI.shape[1]]
