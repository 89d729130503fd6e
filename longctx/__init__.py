"""longctx: a serving engine for huge prompts."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a checkout the sibling folders (attention/, quant/, ...) are our subpackages; prefer them over another install.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "attention" / "__init__.py").exists() and (_checkout / "pyproject.toml").exists():
    __path__.append(str(_checkout))

__version__ = "0.1.0"

# Lazy (PEP 562): importing longctx.attention runs this file first and must not pull in the engine.
_exports = {
    "LLM": "longctx.llm",
    "SamplingParams": "longctx.params",
    "EngineConfig": "longctx.config",
    "LongctxError": "longctx.errors",
}
__all__ = ["LLM", "EngineConfig", "LongctxError", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from longctx.config import EngineConfig
    from longctx.errors import LongctxError
    from longctx.llm import LLM
    from longctx.params import SamplingParams


def __getattr__(name: str) -> Any:
    if name in _exports:
        return getattr(importlib.import_module(_exports[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
