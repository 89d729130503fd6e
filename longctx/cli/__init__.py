"""The command line: `longctx COMMAND`."""

from longctx.cli.app import main

__all__ = ["main"]
