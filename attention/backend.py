"""The seam between attention and its kernels: what every backend must compute."""

# Shape legend: T query tokens of one sequence, R sequences, H query heads, D head dim.
from __future__ import annotations

from typing import Protocol

import torch

from longctx.attention.span import AttnParams, DecodeBatch, Span
from longctx.attention.state import AttnState
from longctx.quant.layout import LayerKV


class Backend(Protocol):
    """Computes partial attention states from stored keys and values.

    Promises: row i of `span_state` depends only on its query, its position and the stored keys it may see, bit for
    bit, whatever T is and wherever the chunk begins; rows that see no key of the span are `(0, -inf)`; positions past
    the sequence's written end and unused rows of a block are never read into a result (they may hold NaN).
    """

    name: str

    def span_state(self, q_THD: torch.Tensor, start: int, span: Span, params: AttnParams) -> AttnState:
        """State of queries at positions start .. start+T-1 over the keys they see of one tile of their own sequence.

        The span lies between two borders (`tile_end`).
        """
        ...

    def decode_state(self, q_RHD: torch.Tensor, layer: LayerKV, batch: DecodeBatch, params: AttnParams) -> AttnState:
        """State of one query per sequence over all keys it may see, as `AttnParams` says."""
        ...
