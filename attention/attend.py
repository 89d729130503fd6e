"""Folding spans into one state, and the learned sink that closes it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch

from longctx.attention.backend import Backend
from longctx.attention.span import AttnParams, Span
from longctx.attention.state import AttnState, merge


def attend(q_THD: torch.Tensor, start: int, spans: Iterable[Span], params: AttnParams, backend: Backend) -> AttnState:
    """Attention of queries at positions start .. start+T-1 over the union of `spans`, merged in the order given.

    `spans` may be a generator that begins the next copy before it yields. At least one span is needed.
    """
    return reduce(merge, (backend.span_state(q_THD, start, span, params) for span in spans))


def merge_sink(state: AttnState, sink_H: torch.Tensor) -> AttnState:
    """Close a state with a learned sink: one more key with logit `sink_H` [H] and value 0 (gpt-oss)."""
    sink = sink_H.to(torch.float32).expand_as(state.lse)
    return merge(state, AttnState(torch.zeros_like(state.out), sink))
