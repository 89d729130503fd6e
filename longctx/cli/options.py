"""The options that several commands share, in the same words."""

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

Attention = Annotated[
    str, typer.Option(metavar="auto|torch|numba|triton", help="what computes attention; auto is the fastest there")
]
Weights = Annotated[str, typer.Option(metavar="auto|int8", help="int8: a quarter of the bytes, and faster, on a CPU")]
ChunkTokens = Annotated[str | None, typer.Option(metavar="N", help="prompt tokens per step; fixes it")]
MaxModelLen = Annotated[str | None, typer.Option(metavar="N", help="the longest request, such as 128K")]
RopeScaling = Annotated[str | None, typer.Option(metavar="yarn|linear", help="beyond a model's positions")]
KVMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="the cache's pool, such as 2GiB")]
DType = Annotated[str, typer.Option(help="arithmetic and weights")]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy for random weights")]
DeviceMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="weights, workspace and pool")]
