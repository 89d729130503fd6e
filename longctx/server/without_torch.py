"""Keeps torch out of a process that only reads and writes text: a second of start and 150 MB of memory less."""

from __future__ import annotations

import logging
import sys


def keep_torch_out() -> None:
    """Let transformers find no torch in this process, as where none is installed: tokenizers and templates need none.

    Without effect where torch is loaded already. Call it before anything imports transformers, which takes torch along
    whenever it finds it.
    """
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # what `import` and `find_spec` take for "there is none"
    logging.getLogger("transformers").addFilter(_no_advice)


def _no_advice(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()
