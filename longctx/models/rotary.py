"""Rotary tables whose regime is chosen per token by its request, not by the longest mate in the batch."""

# Shape legend: T tokens of a flat batch, R regimes in it, F rotary frequencies, D rotated dimensions (F or 2F).
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longctx.errors import ModelError
from longctx.models.spec import RopeSpec

_CHECKED_POSITIONS = (0, 1, 2, 3, 63, 255, 1000, 4097, 15_962, 131_071)
_MAX_KEPT_REGIMES = 1024


class RegimeRotary(nn.Module):
    """Takes the place of a Hugging Face rotary module and gives the same cos and sin, bit for bit, at each regime.

    `regimes` [T] int64 holds each token's `RopeSpec.regime`; the runner sets it before a forward, None means all 0.
    It matters only to longrope and dynamic NTK, where Hugging Face lets the largest position of the whole forward
    choose the frequencies, so that a long batch mate changes a short request.

    Frequencies are asked of Hugging Face's own module at the regime's length. They are plain fp32 tensors and not
    buffers, so that casting the model to 16 bits cannot touch them, and phases are computed in fp32.
    """

    def __init__(self, source: nn.Module, rope: RopeSpec) -> None:
        super().__init__()
        self.regimes: torch.Tensor | None = None
        self._source_type: Any = type(source)
        self._config: Any = source.config
        self._rope = rope
        rope_type: Any = source.rope_type
        self._rope_types: dict[str | None, str] = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        changing = [kind for kind in self._rope_types.values() if kind == "longrope" or "dynamic" in kind]
        assert bool(changing) == (rope.kind != "static"), f"spec says {rope.kind} rope, the model has {rope_type}"
        self._scales: dict[str | None, float] = {}
        self._frequencies: dict[tuple[str | None, int], torch.Tensor] = {}
        for layer_type in self._rope_types:
            module, (cos, _) = self._ask(layer_type, [0], torch.bfloat16)
            prefix = "" if layer_type is None else f"{layer_type}_"
            self._scales[layer_type] = getattr(module, f"{prefix}attention_scaling")
            self._repeats = cos.shape[-1] // self.frequencies(0, layer_type).shape[0]
            self._dtype = None if cos.dtype == torch.bfloat16 else cos.dtype

    def frequencies(self, regime: int, layer_type: str | None = None) -> torch.Tensor:
        """The inverse frequencies [F] fp32 (on the CPU) of a regime."""
        key = (layer_type, regime if self._has_regimes(layer_type) else 0)
        if key not in self._frequencies:
            if len(self._frequencies) >= _MAX_KEPT_REGIMES:
                self._frequencies.clear()
            length = max(key[1], 1) if self._rope.kind == "dynamic" else 1 + self._rope.original_positions * key[1]
            module, _ = self._ask(layer_type, [length - 1], torch.float32)
            name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
            self._frequencies[key] = getattr(module, name).detach().clone()
        return self._frequencies[key]

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [1, T, D] at `position_ids` [1, T], in the dtype Hugging Face's module would give for `x`."""
        frequencies = self._per_token(position_ids.shape[-1], layer_type).to(x.device)
        phases = position_ids[..., None].float() * frequencies
        if self._repeats == 2:
            phases = torch.cat((phases, phases), dim=-1)
        scale, dtype = self._scales[layer_type], self._dtype or x.dtype
        return (phases.cos() * scale).to(dtype), (phases.sin() * scale).to(dtype)

    def difference(self) -> str | None:
        """Where the tables differ from Hugging Face's in any bit, tried on both sides of each border; None: nowhere."""
        original = self._rope.original_positions
        for layer_type, rope_type in self._rope_types.items():
            lengths = [original, original + 1, 3 * original] if self._has_regimes(layer_type) else [131_072]
            for length in lengths:
                positions = [p for p in _CHECKED_POSITIONS if p < length] + [length - 1]
                self.regimes = torch.full((len(positions),), self._rope.regime(length))
                ours = self(torch.empty(0), torch.tensor([positions]), layer_type)
                self.regimes = None
                _, theirs = self._ask(layer_type, positions, torch.float32)
                if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
                    return f"rope type {rope_type} at {length} tokens"
        return None

    def _per_token(self, num_tokens: int, layer_type: str | None) -> torch.Tensor:
        """Frequencies [F] when the batch has one regime, [T, F] otherwise."""
        if self.regimes is None or not self._has_regimes(layer_type):
            return self.frequencies(0, layer_type)
        assert self.regimes.shape == (num_tokens,), f"{tuple(self.regimes.shape)} regimes for {num_tokens} tokens"
        present_R, index_T = torch.unique(self.regimes.cpu(), return_inverse=True)
        table_RF = torch.stack([self.frequencies(int(regime), layer_type) for regime in present_R])
        return table_RF[0] if len(table_RF) == 1 else table_RF[index_T]

    def _has_regimes(self, layer_type: str | None) -> bool:
        rope_type = self._rope_types[layer_type]
        return self._rope.kind != "static" and (rope_type == "longrope" or "dynamic" in rope_type)

    def _ask(
        self, layer_type: str | None, positions: Sequence[int], dtype: torch.dtype
    ) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
        """A new module of Hugging Face's and its tables at `positions`, in the regime of the largest of them."""
        module = self._source_type(self._config)
        layer = () if layer_type is None else (layer_type,)
        return module, module(torch.empty(0, dtype=dtype), torch.tensor([positions]), *layer)


def _is_complex(module: nn.Module) -> bool:
    """Whether it gives one complex number for each frequency, as Llama 4's does, instead of cos and sin."""
    if isinstance(module.rope_type, dict):
        return False
    return isinstance(module(torch.empty(0), torch.zeros(1, 1, dtype=torch.int64)), torch.Tensor)


def swap_rotary(model: PreTrainedModel, rope: RopeSpec) -> list[RegimeRotary]:
    """Replace the model's rotary modules; the runner sets `regimes` on each of those returned.

    A rotary embedding that cannot be reproduced bit for bit stays Hugging Face's own where its regime never changes.
    Raises ModelError where it does change.
    """
    swapped: dict[nn.Module, RegimeRotary] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not (type(module).__name__.endswith("RotaryEmbedding") and hasattr(module, "rope_type")):
            continue
        if _is_complex(module):
            if rope.kind != "static":
                raise ModelError(f"{type(module).__name__} has regimes and complex numbers, which is not supported")
            # A new one, whose frequencies no cast of the model has rounded.
            owner, leaf = name.rpartition(".")[::2]
            setattr(model.get_submodule(owner), leaf, type(module)(module.config).to(model.device))
            continue
        if module not in swapped:
            replacement = RegimeRotary(module, rope)
            difference = replacement.difference()
            if difference and rope.kind != "static":
                raise ModelError(
                    f"{difference} of {type(module).__name__} does not match Hugging Face's; "
                    "this model cannot be served exactly, use a verified model type"
                )
            if difference:
                continue
            swapped[module] = replacement
        owner, leaf = name.rpartition(".")[::2]
        setattr(model.get_submodule(owner), leaf, swapped[module])
    return list(swapped.values())
