"""Where the time of a step goes: linears, LM head, attention, norms, other operators, and what is left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from longctx.evals.bench.probe import ATTENTION_RANGE, timed_attention

STEP_RANGE = "longctx step"
NORM_RANGE = "longctx norm"
_LINEAR = ("mkldnn::_linear_pointwise", "aten::linear", "aten::addmm", "aten::mm", "aten::matmul", "aten::bmm")
PARTS = ("linears", "lm_head", "attention", "norms", "other_operators", "rest")
"""`rest` is Python, and compiled loops that torch does not see (fused rotary and head norms)."""


class StepProfile:
    """The breakdown of an engine's steps, taken while it is open; use `step` as that of `run_request`.

    `wanted(request)` says, before a step, whether it counts. The numbers are there once it is closed.
    """

    def __init__(self, engine: Any, wanted: Callable[[Any], bool]) -> None:
        self._engine = engine
        self._wanted = wanted
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps = 0
        self._tokens = 0

    def __enter__(self) -> StepProfile:
        self._stack = ExitStack()
        self._stack.enter_context(_named_norms(self._engine.loaded.model))
        self._stack.enter_context(timed_attention(self._engine))
        self._recorded = self._stack.enter_context(profile(activities=[ProfilerActivity.CPU], record_shapes=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for event in self._recorded.events() or ():
            if event.name == STEP_RANGE:
                self._add(event)

    def step(self, request: Any) -> list[Any]:
        """One step of the engine, marked if wanted."""
        if not self._wanted(request):
            return list(self._engine.step())
        with record_function(STEP_RANGE):
            events = list(self._engine.step())
        self._steps += 1
        self._tokens += self._engine.last_step.num_tokens
        return events

    def to_json(self) -> dict[str, Any]:
        """Milliseconds of a mean step by part. The profiler itself costs some of `rest` and `other_operators`."""
        ms = {f"{part}_ms": 1e3 * self._seconds[part] / max(1, self._steps) for part in PARTS}
        return {"steps": self._steps, "tokens": self._tokens, "total_ms": sum(ms.values()), **ms}

    def _add(self, whole: Any) -> None:
        head_rows = self._engine.loaded.spec.vocab_size
        left = whole.time_range.elapsed_us()
        for event in _outermost(whole.cpu_children):
            spent = event.time_range.elapsed_us()
            self._seconds[_part(event, head_rows)] += spent / 1e6
            left -= spent
        self._seconds["rest"] += max(0.0, left / 1e6)


def _outermost(events: Sequence[Any]) -> Iterator[Any]:
    """The events that belong to one part whole: ranges of other names are looked into."""
    for event in events:
        if "::" in event.name or event.name in (ATTENTION_RANGE, NORM_RANGE):
            yield event
        else:
            yield from _outermost(event.cpu_children)


def _part(event: Any, head_rows: int) -> str:
    if event.name == ATTENTION_RANGE:
        return "attention"
    if event.name == NORM_RANGE:
        return "norms"
    if event.name.startswith(_LINEAR):
        weights = [shape for shape in event.input_shapes if shape]
        return "lm_head" if any(shape[0] == head_rows for shape in weights) else "linears"
    return "other_operators"


@contextmanager
def _named_norms(model: Any) -> Iterator[None]:
    """Mark the norm modules, whose compiled loops no profiler of torch would show."""
    with ExitStack() as stack:
        for module in model.modules():
            if type(module).__name__.endswith("Norm"):
                ranges: list[Any] = []
                stack.callback(module.register_forward_pre_hook(_opener(ranges)).remove)
                stack.callback(module.register_forward_hook(_closer(ranges)).remove)
        yield


def _opener(ranges: list[Any]) -> Callable[..., None]:
    def begin(*_: Any) -> None:
        ranges.append(record_function(NORM_RANGE))
        ranges[-1].__enter__()

    return begin


def _closer(ranges: list[Any]) -> Callable[..., None]:
    def end(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    return end
