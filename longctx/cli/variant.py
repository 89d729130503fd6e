"""The options of attention variants, alike on every command that runs or plans for a model."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from longctx.units import parse_tokens

Variant = Annotated[
    str,
    typer.Option(
        "--variant", metavar="exact|streaming|local-chunk", help="what full-attention layers see; others are lossy"
    ),
]
Window = Annotated[
    str | None, typer.Option(metavar="N", help="with --variant streaming: the last tokens are seen, 4K if absent")
]
Sinks = Annotated[int | None, typer.Option(help="with --variant streaming: and the first ones, 4 if absent")]
LocalChunk = Annotated[
    str | None, typer.Option(metavar="N", help="with --variant local-chunk: the size of a chunk, 8K if absent")
]


def variant_options(variant: str, window: str | None, sinks: int | None, local_chunk: str | None) -> dict[str, Any]:
    """The options of `VariantConfig` by name, lengths as numbers."""
    return {
        "attention_variant": variant,
        "window": None if window is None else parse_tokens(window, "--window"),
        "sinks": sinks,
        "local_chunk": None if local_chunk is None else parse_tokens(local_chunk, "--local-chunk"),
    }
