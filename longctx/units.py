"""Sizes, token counts and rates as people write them: parsed strictly, printed readably."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from longctx.errors import LongctxError

# "GB" is decimal and "GiB" binary, as the standard has it; one letter alone is binary, as most tools read it.
_BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _BYTE_UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_TOKEN_UNITS = {"": 1, "k": 1024, "m": 1024**2}

MAX_BYTES = 2**60
MAX_TOKENS = 2**40

_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_bytes(value: str | int | float, what: str = "size") -> int:
    """Bytes of "8GiB", "64GB" (decimal), "512MiB", "8G" (binary) or a plain number; raises `LongctxError`."""
    return _parse(value, what, _BYTE_UNITS, "8GiB, 64GB or a plain number of bytes", MAX_BYTES, least=0)


def parse_tokens(value: str | int | float, what: str = "token count") -> int:
    """Tokens of "128K" (K = 1,024), "1M" (1,048,576) or a plain number; raises `LongctxError`."""
    return _parse(value, what, _TOKEN_UNITS, "128K, 1M or a plain number from 1", MAX_TOKENS, least=1)


def parse_rate(value: str | int | float, what: str = "speed") -> float:
    """Bytes per second of "900GB/s" or a plain number; raises `LongctxError`."""
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str) and text[-2:].lower() == "/s":
        text = text[:-2].rstrip()
    elif isinstance(text, str) and re.search("[a-zA-Z]", text):
        raise _error(value, what, "900GB/s")
    try:
        return float(_parse(text, what, _BYTE_UNITS, "900GB/s", MAX_BYTES, least=1))
    except LongctxError as error:
        raise _error(value, what, "900GB/s") from error


def _parse(value: str | int | float, what: str, units: dict[str, int], example: str, most: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _error(value, what, example)
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value.strip())
        unit = units.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise _error(value, what, example)
        exact = Fraction(match[1].replace("_", "")) * unit
    elif math.isfinite(value):
        exact = Fraction(value)
    else:
        raise _error(value, what, example)
    if exact.denominator != 1 or not least <= exact <= most:
        raise _error(value, what, example)
    return int(exact)


def _error(value: object, what: str, example: str) -> LongctxError:
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    return LongctxError(f"{what} {shown} is not understood: write {example}")


def format_bytes(num_bytes: float) -> str:
    """Three significant digits in decimal units: 41.9 GB, 2,684 GB, 512 B."""
    sign, size = ("-" if num_bytes < 0 else ""), abs(num_bytes)
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * scale:
            return f"{sign}{_three_digits(size / scale)} {unit}"
    return f"{sign}{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """38 ms, 4.2 s, 3 min 20 s, 2 h 05 min, 12 days."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:,.0f} days"
    return f"{round(seconds / 60) // 60:,} h {round(seconds / 60) % 60:02d} min"


def format_tokens(tokens: int) -> str:
    """Exact, with thousands separators: 131,072."""
    return f"{tokens:,}"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
