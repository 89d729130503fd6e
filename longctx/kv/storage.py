"""The bytes of the device pool: one flat allocation per layer group, seen layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longctx.kv.groups import LayerGroup
from longctx.quant.layout import LayerKV
from longctx.step import CopyRows


class KVStorage:
    """Owns the pools' memory. Slots are handed out elsewhere; this class only knows where a slot's bytes are.

    Memory is taken lazily by the operating system, so an idle pool costs address space and not pages. Slot 0, the null
    block, is never read or written through a table.
    """

    def __init__(self, groups: Sequence[LayerGroup], num_slots: Sequence[int], device: torch.device | str = "cpu"):
        self.pools = [
            torch.empty(n * group.layout.block_bytes, dtype=torch.uint8, device=device)
            for group, n in zip(groups, num_slots, strict=True)
        ]
        self._layers = {
            layer: (group.index, group.layout.layer_view(self.pools[group.index], i))
            for group in groups
            for i, layer in enumerate(group.layers)
        }
        self._by_group = [[self._layers[layer][1] for layer in group.layers] for group in groups]

    @property
    def device(self) -> torch.device:
        return self.pools[0].device

    @property
    def pool_bytes(self) -> int:
        return sum(pool.untyped_storage().nbytes() for pool in self.pools)

    def layer(self, layer: int) -> tuple[int, LayerKV]:
        """The group index and the view of model layer `layer`."""
        return self._layers[layer]

    def copy_rows(self, copy: CopyRows) -> None:
        """Copy the first rows of one slot into another, for all layers of the group."""
        for layer in self._by_group[copy.group]:
            for stored in layer.tensors:
                stored[copy.dst, :, : copy.rows] = stored[copy.src, :, : copy.rows]
