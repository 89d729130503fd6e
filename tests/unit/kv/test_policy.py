"""Which layer is stored how: rules in order, K and V apart, by kind and by index, and the text that says it again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import LongctxError
from longctx.kv.groups import formats_text, group_layers, make_groups
from longctx.kv.policy import FormatPolicy
from longctx.models.spec import LayerSpec
from longctx.quant.formats import FORMATS
from tests.helpers.spec import make_spec

HYBRID = [LayerSpec(i, None if i % 3 == 2 else 32, 4, 2, 64, 64, 1.0) for i in range(6)]
FULL = [LayerSpec(i, None, 4, 2, 64, 64, 1.0) for i in range(6)]


def words(text: str, layers=HYBRID, own: str = "bf16") -> list[str]:
    """Each layer's formats as K/V, or one word where they are the same."""
    table = FormatPolicy.parse(text).table(layers, FORMATS[own])
    return [k.name if k is v else f"{k.name}/{v.name}" for k, v in table]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("auto", ["bf16"] * 6),
        ("int8", ["int8"] * 6),
        ("k:int8,v:int4", ["int8/int4"] * 6),
        ("v:int4", ["bf16/int4"] * 6),
        ("global:int4", ["bf16", "bf16", "int4"] * 2),
        ("global:int4,sliding:fp8_e4m3", ["fp8_e4m3", "fp8_e4m3", "int4"] * 2),
        ("layers:0-1,5:fp32", ["fp32", "fp32", "bf16", "bf16", "bf16", "fp32"]),
        ("int8,layers:0,2-3:auto", ["bf16", "int8", "bf16", "bf16", "int8", "int8"]),
        ("int8, layers: 0 , 2 - 2 : v : int4", None),
        ("int8,layers:0,2:v:int4", ["int8/int4", "int8", "int8/int4", "int8", "int8", "int8"]),
        ("k:global:int4,layers:3-9:sliding:int8", ["bf16", "bf16", "int4/bf16", "int8", "int8", "int4/bf16"]),
        ("int4,int8", ["int8"] * 6),
        ("layers:0:int4,int8", ["int8"] * 6),
    ],
)
def test_later_rules_win(text: str, want: list[str] | None) -> None:
    if want is None:
        with pytest.raises(LongctxError, match="write layers:0-1,27"):
            words(text)
    else:
        assert words(text) == want


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("int3", r"KV format 'int3' is unknown: use auto, fp32, .*int4, or rules such as int8 or k:int8"),
        ("", r"KV format '' is unknown"),
        ("int8,", r"KV format '' is unknown"),
        ("INT8", r"KV format 'INT8' is unknown"),
        ("layers:0", r"KV format '0' is unknown"),
        ("q:int8", r"'q' in the KV format 'q:int8' is not understood: write int8 or"),
        ("k:v:int8", r"'v' in the KV format"),
        ("global:sliding:int8", r"'sliding' in the KV format"),
        ("layers:int8", r"layers '' in the KV format 'layers:int8'"),
        ("layers:3-1:int8", r"layers '3-1' in"),
        ("layers:1,,2:int8", r"layers '1,,2' in"),
        ("layers:-1:int8", r"layers '-1' in"),
        ("layers:1:layers:2:int8", r"'layers' in"),
    ],
)
def test_a_wrong_word_is_named(text: str, error: str) -> None:
    with pytest.raises(LongctxError, match=error):
        FormatPolicy.parse(text)


def test_a_head_dim_that_a_format_cannot_hold_is_named() -> None:
    odd = [replace(layer, v_dim=63) for layer in FULL]
    assert words("k:int4", odd) == ["int4/bf16"] * 6
    with pytest.raises(LongctxError, match="int4 cannot hold layer 0: its head dim 63 is no whole number of bytes"):
        words("int4", odd)


@pytest.mark.parametrize(
    ("text", "layers", "lines"),
    [
        ("int8", FULL, []),
        ("global:int8", FULL, []),
        ("sliding:int8", FULL, ["'sliding:int8' covers no layer"]),
        ("int8,layers:6-7:bf16", FULL, ["'layers:6-7:bf16' covers no layer"]),
        ("layers:4-7,9:bf16", FULL, ["'layers:4-7,9:bf16' names layers that are not there: 6-7,9"]),
        ("sliding:layers:2:int8", HYBRID, ["covers no layer"]),
    ],
)
def test_rules_that_do_nothing_are_said(text: str, layers: list[LayerSpec], lines: list[str]) -> None:
    found = FormatPolicy.parse(text).idle(layers)
    assert len(found) == len(lines) and all(line in said for line, said in zip(lines, found, strict=True))


@pytest.mark.parametrize(
    ("text", "layers", "want"),
    [
        ("global:int8,sliding:int8", HYBRID, "int8"),
        ("k:int8,v:int4", HYBRID, "k:int8,v:int4"),
        ("sliding:bf16,global:int4", HYBRID, "global:int4,sliding:bf16"),
        ("global:int4", FULL, "int4"),
        ("int8,layers:0,5:bf16", FULL, "int8,layers:0,5:bf16"),
        ("layers:0-3:int8,layers:4-5:k:fp32", FULL, "int8,layers:4-5:k:fp32,layers:4-5:v:bf16"),
        ("int4,sliding:auto,layers:2:fp16", HYBRID, "global:fp16,sliding:bf16,layers:5:int4"),
    ],
)
def test_the_effective_table_in_few_words(text: str, layers: list[LayerSpec], want: str) -> None:
    groups = group_layers(layers, FormatPolicy.parse(text).table(layers, FORMATS["bf16"]), 16)
    assert formats_text(groups) == want


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_effective_text_says_the_table_exactly(data) -> None:
    """Parsed again it gives the same table: it is what the block key, the metrics and the reports are told."""
    layers = data.draw(st.sampled_from([HYBRID, FULL]))
    names = st.sampled_from(["int8", "int4", "bf16"])
    chosen = [(data.draw(names), data.draw(names)) for _ in layers]
    groups = group_layers(layers, [(FORMATS[k], FORMATS[v]) for k, v in chosen], 16)
    again = FormatPolicy.parse(formats_text(groups)).table(layers, FORMATS["fp32"])
    assert [(k.name, v.name) for k, v in again] == chosen


def test_layers_stored_alike_share_a_group() -> None:
    spec = make_spec(layers=6)
    assert [group.layers for group in make_groups(spec, 16, FormatPolicy.parse("int8"))] == [tuple(range(6))]
    groups = make_groups(spec, 16, FormatPolicy.parse("int8,layers:0,5:auto,layers:2:v:int4"))
    assert [group.layers for group in groups] == [(0, 5), (1, 3, 4), (2,)]
    assert [(g.layout.k_format.name, g.layout.v_format.name) for g in groups] == [
        ("fp32", "fp32"),
        ("int8", "int8"),
        ("int8", "int4"),
    ]
