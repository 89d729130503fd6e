"""Which format each layer's keys and values are stored in: one word for all, or rules by part, kind and layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from longctx.errors import LongctxError
from longctx.models.spec import LayerSpec
from longctx.quant.formats import FORMATS, KVFormat

AUTO = "auto"
EXAMPLE = "int8 or k:int8,v:int4 or global:int4,sliding:bf16,layers:0-1,27:bf16"

_LAYER_LIST = re.compile(r"layers:\s*(\d[\d\s,-]*):")
_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def kind_of(mask_kind: str) -> str:
    """What rules call a layer whose mask is of `mask_kind`."""
    return "global" if mask_kind == "full" else "sliding"


@dataclass(frozen=True)
class Rule:
    """One rule: `format` ("auto" is the model's own dtype) for what every scope given lets through.

    `part` is "k" or "v", `kind` "global" (full attention) or "sliding" (any other), `layers` ascending model indices.
    """

    text: str
    format: str
    part: str | None = None
    kind: str | None = None
    layers: tuple[int, ...] | None = None

    def covers(self, layer: LayerSpec) -> bool:
        return self.kind in (None, kind_of(layer.reach.kind)) and (self.layers is None or layer.index in self.layers)


@dataclass(frozen=True)
class FormatPolicy:
    """Rules in order, of which the last that covers a layer's K or V decides; what none covers is "auto".

    Text: rules between commas, each `[k:|v:][global:|sliding:][layers:0-1,27:]FORMAT`, its scopes in any order.
    """

    rules: tuple[Rule, ...] = ()

    @classmethod
    def parse(cls, text: str) -> FormatPolicy:
        """Read a policy; raises `LongctxError` naming the word that is wrong."""
        joined = _LAYER_LIST.sub(lambda match: f"layers:{match[1].replace(',', '+')}:", text)
        return cls(tuple(_parse_rule(part.strip().replace("+", ","), text) for part in joined.split(",")))

    def table(self, layers: Sequence[LayerSpec], own: KVFormat) -> list[tuple[KVFormat, KVFormat]]:
        """The (K, V) formats of every layer, `own` being "auto".

        Raises `LongctxError` where a format cannot hold a layer's head dim.
        """
        return [self._formats_of(layer, own) for layer in layers]

    def idle(self, layers: Sequence[LayerSpec]) -> list[str]:
        """What a user should hear of rules that do nothing: they cover no layer, or name one that does not exist."""
        found = []
        for rule in self.rules:
            if not any(rule.covers(layer) for layer in layers):
                found.append(f"the KV format rule {rule.text!r} covers no layer of this model")
            elif missing := sorted(set(rule.layers or ()) - {layer.index for layer in layers}):
                found.append(f"the KV format rule {rule.text!r} names layers that are not there: {_spell(missing)}")
        return found

    def _formats_of(self, layer: LayerSpec, own: KVFormat) -> tuple[KVFormat, KVFormat]:
        chosen = {"k": own, "v": own}
        for rule in self.rules:
            if rule.covers(layer):
                fmt = own if rule.format == AUTO else FORMATS[rule.format]
                chosen |= dict.fromkeys("kv" if rule.part is None else rule.part, fmt)
        for part, dim in (("k", layer.k_dim), ("v", layer.v_dim)):
            if dim * chosen[part].bits % 8:
                raise LongctxError(
                    f"KV format {chosen[part].name} cannot hold layer {layer.index}: its head dim {dim} is no whole "
                    "number of bytes; choose another format"
                )
        return chosen["k"], chosen["v"]


def effective_text(formats: Mapping[int, tuple[str, str, str]]) -> str:
    """A policy, as short as it goes, that gives each layer its (kind, K format, V format); one word where all agree."""
    pairs = {layer: (k, v) for layer, (_, k, v) in formats.items()}
    usual = {
        kind: Counter(pairs[layer] for layer, own in sorted(formats.items()) if own[0] == kind).most_common(1)[0][0]
        for kind in sorted({kind for kind, _, _ in formats.values()})
    }
    if len(set(usual.values())) == 1:
        rules = _rules_text("", *next(iter(usual.values())))
    else:
        rules = [rule for kind, pair in usual.items() for rule in _rules_text(f"{kind}:", *pair)]
    others: dict[tuple[str, str], list[int]] = {}
    for layer in sorted(formats):
        if pairs[layer] != usual[formats[layer][0]]:
            others.setdefault(pairs[layer], []).append(layer)
    for pair, layers in others.items():
        rules += _rules_text(f"layers:{_spell(layers)}:", *pair)
    return ",".join(rules)


def _rules_text(scope: str, k_format: str, v_format: str) -> list[str]:
    if k_format == v_format:
        return [scope + k_format]
    return [f"{scope}k:{k_format}", f"{scope}v:{v_format}"]


def _parse_rule(rule: str, policy: str) -> Rule:
    *scopes, name = (word.strip() for word in rule.split(":"))
    if name != AUTO and name not in FORMATS:
        raise LongctxError(
            f"KV format {name!r} is unknown: use {AUTO}, {', '.join(FORMATS)}, or rules such as {EXAMPLE}"
        )
    part = kind = None
    layers: tuple[int, ...] | None = None
    scopes_left = iter(scopes)
    for scope in scopes_left:
        if scope in ("k", "v") and part is None:
            part = scope
        elif scope in ("global", "sliding") and kind is None:
            kind = scope
        elif scope == "layers" and layers is None:
            layers = _parse_layers(next(scopes_left, ""), policy)
        else:
            raise LongctxError(f"{scope!r} in the KV format {policy!r} is not understood: write {EXAMPLE}")
    return Rule(rule, name, part, kind, layers)


def _parse_layers(text: str, policy: str) -> tuple[int, ...]:
    found: set[int] = set()
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise LongctxError(f"layers {text!r} in the KV format {policy!r} are not understood: write layers:0-1,27:")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def _spell(layers: Sequence[int]) -> str:
    """Ascending indices as ranges: 0-1,27."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1][-1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
