"""Folding spans into one state, and the learned sink that closes it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from longctx.attention.backend import Backend
from longctx.attention.span import AttnParams, Span, rows_that_see
from longctx.attention.state import AttnState, empty_state, merge, merge_into


def attend(q_THD: torch.Tensor, start: int, spans: Iterable[Span], params: AttnParams, backend: Backend) -> AttnState:
    """Attention of queries at positions start .. start+T-1 over the union of `spans`, merged in the order given.

    `spans` may be a generator that begins the next copy before it yields. At least one span is needed.
    """
    num_tokens, num_heads, _ = q_THD.shape
    state = None
    for span in spans:
        # A window tile is seen by few of the rows: the others are neither computed nor merged.
        first, last = (p - start for p in rows_that_see(span, start, start + num_tokens, params))
        if first == last and state is not None:
            continue
        part = backend.span_state(q_THD[first:last], start + first, span, params)
        if state is None and last - first == num_tokens:
            state = part
            continue
        if state is None:
            state = empty_state(num_tokens, num_heads, part.out.shape[2], q_THD.device)
        merge_into(AttnState(state.out[first:last], state.lse[first:last]), part)
    assert state is not None, "attention over no spans"
    return state


def merge_sink(state: AttnState, sink_H: torch.Tensor) -> AttnState:
    """Close a state with a learned sink: one more key with logit `sink_H` [H] and value 0 (gpt-oss)."""
    sink = sink_H.to(torch.float32).expand_as(state.lse)
    return merge(state, AttnState(torch.zeros_like(state.out), sink))
