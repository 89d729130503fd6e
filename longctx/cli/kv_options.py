"""The options of how keys and values are stored, the same in every command."""

from __future__ import annotations

from typing import Annotated

import typer

KVFormat = Annotated[
    str,
    typer.Option(
        metavar="FORMAT|RULES",
        help="auto (the model's dtype), int8, int4, fp8_e4m3, ..., or rules such as k:int8,v:int4,layers:0-1:bf16",
    ),
]
KVFactors = Annotated[str | None, typer.Option(metavar="FILE", help="key factors that LLM.calibrate_kv made")]
