"""Factors for the channels of keys: a key is stored divided by them and its queries are multiplied, so that channels
that are always large do not take the codes of all others."""

# Shape legend: T tokens, H query heads, K kv heads, D head dim.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from longctx.errors import LongctxError
from longctx.kv.groups import LayerGroup
from longctx.models.spec import LayerSpec
from longctx.offload.key import digest_of

_LEAST_SHARE = 1 / 64
"""A channel's factor is at least this share of its head's largest: what sample text left quiet may yet speak up."""


class KeyTransform(Protocol):
    """What queries and keys go through before keys are stored and queries attend."""

    def apply(self, layer: int, q_HTD: torch.Tensor, k_KTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries to attend with and the keys to store, with the same products as those given."""
        ...


class KeyFactors:
    """One factor for every (kv head, channel) of each layer's keys, positive and finite: `by_layer` [K, D] fp32.

    Scores stay what they were: a query head's factors are those of its kv head. Keys are divided after rotation, as
    they are stored. The idea is SmoothQuant's (Xiao et al. 2022), keys by channel are KIVI's (Liu et al. 2024).
    """

    def __init__(self, by_layer: Mapping[int, torch.Tensor]) -> None:
        self._by_layer = dict(sorted(by_layer.items()))

    @property
    def digest(self) -> str:
        """Identifies the factors by their values, for the keys of the blocks that are stored with them."""
        return digest_of({str(layer): factor_KD.tolist() for layer, factor_KD in self._by_layer.items()})

    def for_lossy(self, groups: Sequence[LayerGroup], device: torch.device | str) -> KeyFactors | None:
        """Those of layers whose keys are stored in a lossy format, on `device`; None if there is no such layer."""
        lossy = {layer for group in groups if group.layout.k_format.lossy for layer in group.layers}
        chosen = {layer: x.to(device) for layer, x in self._by_layer.items() if layer in lossy}
        return KeyFactors(chosen) if chosen else None

    def apply(self, layer: int, q_HTD: torch.Tensor, k_KTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        factor_KD = self._by_layer.get(layer)
        if factor_KD is None:
            return q_HTD, k_KTD
        factor_HD = factor_KD.repeat_interleave(q_HTD.shape[0] // len(factor_KD), 0)
        return q_HTD * factor_HD[:, None], k_KTD / factor_KD[:, None]

    def save(self, path: Path | str) -> Path:
        """Write a safetensors file; raises `LongctxError` where one stands or none can be written."""
        path = Path(path).expanduser()
        if path.exists():
            raise LongctxError(f"{path} exists; key factors are not written over another file")
        try:
            save_file({_name(layer): x.cpu().contiguous() for layer, x in self._by_layer.items()}, path)
        except (OSError, SafetensorError) as error:
            raise LongctxError(f"key factors cannot be written to {path}: {error}") from error
        return path

    @classmethod
    def load(cls, path: Path | str, layers: Sequence[LayerSpec]) -> KeyFactors:
        """Read what `save` wrote for a model of `layers`. Raises `LongctxError` naming the tensor, what it has and what
        it should have."""
        path = Path(path).expanduser()
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise LongctxError(f"key factors cannot be read from {path}: {reason}") from error
        shapes = {_name(layer.index): (layer.num_kv_heads, layer.k_dim) for layer in layers}
        if strange := sorted(set(tensors) ^ set(shapes)):
            kind = "lacks" if strange[0] in shapes else "has a tensor that is none of this model's:"
            raise LongctxError(f"the key factors in {path} {kind} {strange[0]}; calibrate them for this model")
        for name, shape in shapes.items():
            _check(path, name, tensors[name], shape)
        return cls({layer.index: tensors[_name(layer.index)].float() for layer in layers})


def _check(path: Path, name: str, factor: torch.Tensor, shape: tuple[int, int]) -> None:
    expected = f"expected positive, finite numbers of shape {shape}"
    if tuple(factor.shape) != shape or not factor.is_floating_point():
        found = f"{str(factor.dtype).removeprefix('torch.')} of shape {tuple(factor.shape)}"
        raise LongctxError(f"the key factors {name} in {path} are {found}: {expected}")
    values = factor.float()
    if bool((bad := ~(torch.isfinite(values) & (values > 0))).any()):
        raise LongctxError(f"the key factors {name} in {path} hold {values[bad][0].item()}: {expected}")


class KeyStatistics:
    """Watches the keys of a run, for `KeyFactors` that even out their channels; queries and keys pass as they are."""

    def __init__(self, then: KeyTransform | None = None) -> None:
        self._then = then
        self._squares: dict[int, torch.Tensor] = {}

    def apply(self, layer: int, q_HTD: torch.Tensor, k_KTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        squares_KD = k_KTD.double().square().sum(1)
        self._squares[layer] = self._squares.get(layer, 0) + squares_KD
        return (q_HTD, k_KTD) if self._then is None else self._then.apply(layer, q_HTD, k_KTD)

    def factors(self) -> KeyFactors:
        """Each channel's root mean square; 1 for a head whose keys were all zeros."""
        found = {}
        for layer, squares_KD in self._squares.items():
            rms_KD = squares_KD.sqrt()
            largest_K1 = rms_KD.amax(-1, keepdim=True)
            even_KD = torch.where(largest_K1 > 0, rms_KD / largest_K1, 1.0)
            found[layer] = even_KD.clamp(min=_LEAST_SHARE).float().cpu()
        return KeyFactors(found)


def _name(layer: int) -> str:
    return f"layers.{layer}.k_factors"
