"""Attention variants that a user may choose for layers of full attention. Lossy, never chosen by themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral

from longctx.attention.reach import Reach
from longctx.errors import LongctxError
from longctx.models.spec import LayerSpec, ModelSpec

EXACT, STREAMING, LOCAL_CHUNK = "exact", "streaming", "local-chunk"
DEFAULT_WINDOW, DEFAULT_SINKS, DEFAULT_LOCAL_CHUNK = 4096, 4, 8192
_OWNERS = {"window": STREAMING, "sinks": STREAMING, "local_chunk": LOCAL_CHUNK}


@dataclass(frozen=True)
class VariantConfig:
    """What the model's full-attention layers see; its own windows stay as they are.

    - `streaming` (StreamingLLM: Xiao et al. 2023): the last `window` tokens, the query's own among them, and the first
      `sinks`, without which a model that lost its front speaks nonsense.
    - `local-chunk`: the tokens of the query's own multiple of `local_chunk`.

    Keys keep their own positions: each is rotated once, for where it stands in the whole sequence, and stays so. The
    logits are those of the model under the mask, and the model's limit of positions is as it was.
    """

    attention_variant: str = EXACT
    window: int | None = None
    sinks: int | None = None
    local_chunk: int | None = None

    def __post_init__(self) -> None:
        known = (EXACT, STREAMING, LOCAL_CHUNK)
        if self.attention_variant not in known:
            raise LongctxError(f"attention variant {self.attention_variant!r} is unknown; choose {', '.join(known)}")
        for name, owner in _OWNERS.items():
            value, least = getattr(self, name), 0 if name == "sinks" else 1
            if value is None:
                continue
            if self.attention_variant != owner:
                raise LongctxError(
                    f"{name} {value!r} goes with the attention variant {owner}: choose it, or leave {name} out"
                )
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise LongctxError(f"{name} must be a whole number of tokens, at least {least}, got {value!r}")
        reach = self.reach
        if reach is not None and reach.window is not None and reach.sinks >= reach.window:
            raise LongctxError(f"sinks {reach.sinks:,} must be fewer than the window's {reach.window:,} tokens")

    @property
    def reach(self) -> Reach | None:
        """What is seen instead of everything; None for `exact`."""
        if self.attention_variant == STREAMING:
            sinks = DEFAULT_SINKS if self.sinks is None else self.sinks
            return Reach(self.window or DEFAULT_WINDOW, sinks)
        if self.attention_variant == LOCAL_CHUNK:
            return Reach(local_chunk=self.local_chunk or DEFAULT_LOCAL_CHUNK)
        return None

    @property
    def key(self) -> str:
        """Its name in block keys, with every number that its keys and values depend on."""
        reach = self.reach
        if reach is None:
            return EXACT
        numbers = f"-c{reach.local_chunk}" if reach.window is None else f"-w{reach.window}-s{reach.sinks}"
        return self.attention_variant + numbers

    def __str__(self) -> str:
        """One phrase that says what is lost."""
        reach = self.reach
        if reach is None:
            return "exact"
        if reach.window is None:
            return f"local-chunk, lossy: full-attention layers see their own {reach.local_chunk:,} tokens only"
        seen = (
            f"the last {reach.window:,} tokens and the first {reach.sinks:,}"
            if reach.sinks
            else (f"the last {reach.window:,} tokens")
        )
        return f"streaming, lossy: full-attention layers see {seen} only"

    def applied_to(self, spec: ModelSpec) -> ModelSpec:
        """The model as it is served: every layer that has full attention of its own gets this variant instead.

        A spec that another variant was applied to is taken back first. `LongctxError` where nothing would change.
        """
        own = replace(spec, layers=tuple(_seeing(x, Reach(), False) if x.by_variant else x for x in spec.layers))
        reach = self.reach
        if reach is None or reach.most is None:
            return own
        if all(layer.reach.most is not None for layer in own.layers):
            raise LongctxError(
                f"{spec.name}: no layer has full attention, so the attention variant {self.attention_variant} changes "
                "nothing: leave it out"
            )
        if reach.most >= own.max_positions:
            raise LongctxError(
                f"{spec.name} has {own.max_positions:,} positions and the attention variant {self.key} sees "
                f"{reach.most:,}, so it changes nothing: leave it out, or make it smaller"
            )
        layers = tuple(_seeing(x, reach, True) if x.reach.most is None else x for x in own.layers)
        return replace(own, layers=layers)


def _seeing(layer: LayerSpec, reach: Reach, by_variant: bool) -> LayerSpec:
    return replace(layer, window=reach.window, sinks=reach.sinks, local_chunk=reach.local_chunk, by_variant=by_variant)
