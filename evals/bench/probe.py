"""Times attention inside a running engine, call by call."""

# Shape legend: T query tokens, R sequences, H query heads, D head dim.
from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.profiler import record_function

from longctx.attention.backend import Backend
from longctx.attention.reach import Reach
from longctx.attention.span import AttnParams, DecodeBatch, Span
from longctx.attention.state import AttnState
from longctx.quant.layout import LayerKV

ATTENTION_RANGE = "longctx attention"
"""The name under which a profile finds what the timed backends did."""


@dataclass
class AttentionTimes:
    """Seconds in attention: of chunks, and of decoded tokens by what they see."""

    prefill_s: float = 0.0
    decode_s: dict[Reach, float] = field(default_factory=dict)

    def clear(self) -> None:
        self.prefill_s = 0.0
        self.decode_s.clear()


class TimedBackend:
    """A backend that computes what another does and notes how long each call took."""

    def __init__(self, inner: Backend, times: AttentionTimes) -> None:
        self.name = inner.name
        self._inner = inner
        self._times = times

    def span_state(self, q_THD: torch.Tensor, start: int, span: Span, params: AttnParams) -> AttnState:
        with record_function(ATTENTION_RANGE):
            began = time.perf_counter()
            state = self._inner.span_state(q_THD, start, span, params)
            self._times.prefill_s += time.perf_counter() - began
        return state

    def decode_state(self, q_RHD: torch.Tensor, layer: LayerKV, batch: DecodeBatch, params: AttnParams) -> AttnState:
        with record_function(ATTENTION_RANGE):
            began = time.perf_counter()
            state = self._inner.decode_state(q_RHD, layer, batch, params)
            seconds = time.perf_counter() - began
        self._times.decode_s[params.reach] = self._times.decode_s.get(params.reach, 0.0) + seconds
        return state


@contextmanager
def timed_attention(engine: Any) -> Iterator[AttentionTimes]:
    """Put timers around the engine's attention backends."""
    times, runner = AttentionTimes(), engine.runner
    before = runner.backends
    decode = None if before.decode is None else TimedBackend(before.decode, times)
    runner.backends = replace(before, prefill=TimedBackend(before.prefill, times), decode=decode)
    try:
        yield times
    finally:
        runner.backends = before
