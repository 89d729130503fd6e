"""One forward pass, planned once per step and run per layer: where tokens are stored and what each row attends to."""

# Shape legend: T tokens of the flat batch, R decoding rows, H query heads, K kv heads, D head dim.
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from longctx.attention.attend import attend, merge_sink
from longctx.attention.registry import Backends
from longctx.attention.span import AttnParams, DecodeBatch, KVView, prefill_spans
from longctx.attention.state import AttnState
from longctx.kv.factors import KeyTransform
from longctx.kv.storage import KVStorage
from longctx.models.spec import LayerSpec
from longctx.parallel.group import Group
from longctx.quant.store import store_tokens
from longctx.step import StepRow

OnAttention = Callable[[int, np.ndarray, torch.Tensor], None]
"""Hears (layer, positions [T] int64, attention output [T, H, Dv] fp32); the tensor is to be copied, not kept."""


@dataclass(frozen=True)
class _GroupPlan:
    """One layer group's share of a step: a slot and a row for each of T tokens, and the decoding rows' tables.

    Slots and rows lie on a GPU where the pool does: copied once per step, not once per layer.
    """

    slots_T: np.ndarray | torch.Tensor
    rows_T: np.ndarray | torch.Tensor
    tables: list[np.ndarray]
    decode: DecodeBatch | None


class ForwardPlan:
    """The plan of one flat batch; it is what the attention hook calls.

    Every layer first stores its new keys and values, then attends to what is stored, so a logit never depends on
    whether a key was computed in this step or long ago. `on_layer(fraction)` is called after each layer with the share
    of layers done; it may raise to abandon the step. `on_attention` sees each layer's result before anything is made
    of it. `keys` changes keys before they are stored, and queries to match.
    """

    def __init__(
        self,
        rows: Sequence[StepRow],
        layers: Sequence[LayerSpec],
        storage: KVStorage,
        block_tokens: int,
        backends: Backends,
        group: Group,
        on_layer: Callable[[float], None] | None = None,
        on_attention: OnAttention | None = None,
        keys: KeyTransform | None = None,
    ):
        self._layers = layers
        self._storage = storage
        self._backends = backends
        self._group = group
        self._on_layer = on_layer
        self._on_attention = on_attention
        self._keys = keys
        self._done = 0
        offsets = np.cumsum([0, *(row.n for row in rows)])
        decodes = [backends.decode is not None and row.n == 1 and row.start >= row.num_prompt_tokens for row in rows]
        self._prefills = [(i, int(offsets[i])) for i in range(len(rows)) if not decodes[i]]
        self._rows = rows
        self._decode_rows = [i for i in range(len(rows)) if decodes[i]]
        self._decode_flat = torch.as_tensor(offsets[:-1][decodes], dtype=torch.int64, device=storage.device)
        self.positions_T = np.concatenate([np.arange(row.start, row.start + row.n, dtype=np.int64) for row in rows])
        self._groups = [self._plan_group(g, block_tokens) for g in range(len(rows[0].tables))]

    def _plan_group(self, group: int, block_tokens: int) -> _GroupPlan:
        tables = [row.tables[group] for row in self._rows]
        slots = [
            table[np.arange(row.start, row.start + row.n, dtype=np.int64) // block_tokens]
            for row, table in zip(self._rows, tables, strict=True)
        ]
        slots_T = np.concatenate(slots)
        assert slots_T.min() > 0, "a token has no slot: it would be written to the null block"
        decode = None
        if self._decode_rows:
            width = max(len(tables[i]) for i in self._decode_rows)
            padded = np.zeros((len(self._decode_rows), width), dtype=np.int64)
            for r, i in enumerate(self._decode_rows):
                padded[r, : len(tables[i])] = tables[i]
            decode = DecodeBatch(padded, np.array([self._rows[i].start for i in self._decode_rows], dtype=np.int64))
        rows_T, device = self.positions_T % block_tokens, self._storage.device
        if device.type == "cpu":
            return _GroupPlan(slots_T, rows_T, tables, decode)
        slots_on, rows_on = (torch.as_tensor(x, device=device) for x in (slots_T, rows_T))
        return _GroupPlan(slots_on, rows_on, tables, decode)

    def attend_layer(
        self,
        layer: int,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sink_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store, attend, combine over ranks, close with the sink: [T, H, Dv] fp32. The hook's other half."""
        spec = self._layers[layer]
        own_window = None if spec.by_variant else spec.window
        assert window == own_window, f"layer {layer} calls with window {window}, planned {own_window}"
        assert softcap == spec.softcap, f"layer {layer} calls with softcap {softcap}, planned {spec.softcap}"
        assert scale is None or scale == spec.scale, f"layer {layer} calls with scale {scale}, planned {spec.scale}"
        assert (sink_H is not None) == spec.has_sink
        group, kv = self._storage.layer(layer)
        plan = self._groups[group]
        if self._keys is not None:
            q_HTD, k_KTD = self._keys.apply(layer, q_HTD, k_KTD)
        store_tokens(kv, plan.slots_T, plan.rows_T, k_KTD, v_KTD)
        params = AttnParams(spec.scale, spec.window, spec.softcap, spec.sinks, spec.local_chunk)
        q_THD = q_HTD.transpose(0, 1)
        if spec.temperature is not None:
            q_THD = q_THD * self._temperatures(*spec.temperature).to(q_THD.device, q_THD.dtype)
        out_THD = torch.empty(q_THD.shape[0], spec.num_heads, spec.v_dim, dtype=torch.float32, device=q_HTD.device)
        for i, offset in self._prefills:
            row = self._rows[i]
            spans = prefill_spans(KVView(kv, plan.tables[i]), row.start, row.n, params, self._backends.span_tokens)
            rows = slice(offset, offset + row.n)
            state = attend(q_THD[rows], row.start, spans, params, self._backends.prefill)
            out_THD[rows] = self._close(state, sink_H)
        if plan.decode is not None:
            assert self._backends.decode is not None
            state = self._backends.decode.decode_state(q_THD[self._decode_flat], kv, plan.decode, params)
            out_THD[self._decode_flat] = self._close(state, sink_H)
        if self._on_attention is not None:
            self._on_attention(layer, self.positions_T, out_THD)
        self._done += 1
        if self._on_layer is not None:
            self._on_layer(self._done / len(self._layers))
        return out_THD

    def _temperatures(self, floor: int, scale: float) -> torch.Tensor:
        """What multiplies the query of each token [T, 1, 1] fp32."""
        steps_T = torch.as_tensor((self.positions_T + 1) // floor, dtype=torch.float32)
        return (torch.log1p(steps_T) * scale + 1.0)[:, None, None]

    def _close(self, state: AttnState, sink_H: torch.Tensor | None) -> torch.Tensor:
        state = self._group.combine(state)
        return state.out if sink_H is None else merge_sink(state, sink_H).out
