"""The `longctx` command: its parts, and how errors leave it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer

from longctx import __version__
from longctx.cli.bench import bench
from longctx.cli.eval import evaluate
from longctx.cli.plan import plan
from longctx.cli.pull import pull
from longctx.cli.route_sim import route_sim
from longctx.cli.run import run
from longctx.cli.serve import serve
from longctx.errors import EngineError, LongctxError

EXIT_ENGINE_ERROR = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

# The base of every error typer raises about options; where it is defined differs between versions of typer.
_UsageError: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")

app = typer.Typer(
    name="longctx",
    help="A serving engine for huge prompts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (run, serve, plan, pull, bench):
    app.command()(_command)
app.command(name="route-sim")(route_sim)
app.command(name="eval")(evaluate)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"longctx {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True)) -> None:
    """A serving engine for huge prompts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    2 after one line on stderr for a user's error, 1 after one line when the engine failed, 130 if interrupted.
    """
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="longctx", standalone_mode=False)
    except LongctxError as error:
        return _fail(str(error))
    except EngineError as error:
        _fail(str(error))
        return EXIT_ENGINE_ERROR
    except _UsageError as error:
        return _fail(error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    if message:  # typer has printed the help itself when no command was given
        print(f"longctx: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USER_ERROR
