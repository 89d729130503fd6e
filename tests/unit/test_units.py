"""Sizes, token counts and rates: what is accepted means one thing, everything else is one clear line."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.errors import LongctxError
from longctx.units import format_bytes, format_seconds, format_tokens, parse_bytes, parse_rate, parse_tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("64GB", 64 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("0.1GB", 10**8),
        ("8g", 8 * 2**30),
        ("1tb", 10**12),
        ("123", 123),
        ("7B", 7),
        ("1_000", 1000),
        ("0", 0),
        (4096, 4096),
        (1e9, 10**9),
    ],
)
def test_sizes(text: str | float, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "tokens"), [("128K", 131072), ("1M", 1048576), ("1.5k", 1536), ("128000", 128000), (" 7 ", 7), (5, 5)]
)
def test_token_counts(text: str | int, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    ("text", "rate"), [("900GB/s", 900e9), ("7.5GB/s", 7.5e9), ("1GiB/S", 2.0**30), ("25 MB/s", 25e6), (3, 3.0)]
)
def test_rates(text: str | int, rate: float) -> None:
    assert parse_rate(text) == rate


BAD = [
    "",
    " ",
    "-1",
    "-8GiB",
    "nan",
    "inf",
    "1e999",
    "8XB",
    "GiB",
    "1,5GB",
    "0.3",
    "8 Gi B",
    float("nan"),
    float("inf"),
]
BAD += [-1, 1.5, True, None, [1], "9" * 400]


@pytest.mark.parametrize("text", [*BAD, "2EB", "2000PB"])
def test_a_size_that_is_none_is_refused_in_one_line(text: object) -> None:
    with pytest.raises(LongctxError, match=r"--kv-memory .* is not understood: write 8GiB") as caught:
        parse_bytes(text, "--kv-memory")  # type: ignore[arg-type]
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("text", [*BAD, "0", 0, "128KiB", "1G", "9999999M"])
def test_a_token_count_that_is_none_is_refused(text: object) -> None:
    with pytest.raises(LongctxError, match=r"--tokens .* is not understood: write 128K"):
        parse_tokens(text, "--tokens")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [*BAD, "900GB", "0GB/s", "/s", "GB/s", "1GB/h", "fast"])
def test_a_speed_that_is_none_is_refused(text: object) -> None:
    with pytest.raises(LongctxError, match=r"--tier .* is not understood: write 900GB/s"):
        parse_rate(text, "--tier")  # type: ignore[arg-type]


def test_the_message_names_what_the_user_wrote() -> None:
    with pytest.raises(LongctxError, match="'12 bananas'"):
        parse_bytes("12 bananas")


@given(st.text(max_size=12))
def test_any_text_is_a_number_or_one_error(text: str) -> None:
    for parse in (parse_bytes, parse_tokens, parse_rate):
        with contextlib.suppress(LongctxError):
            assert parse(text) >= 0


@given(st.integers(0, 2**59))
def test_plain_numbers_survive(size: int) -> None:
    assert parse_bytes(str(size)) == size == parse_bytes(size)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (41_943_040_000, "41.9 GB"),
        (2_684_354_560_000, "2,684 GB"),
        (140e9, "140 GB"),
        (999, "999 B"),
        (999_999, "1.00 MB"),
        (0, "0 B"),
        (-1500, "-1.50 kB"),
        (9_999_999_999, "10.0 GB"),
    ],
)
def test_sizes_are_printed_with_three_digits(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0384, "38 ms"),
        (0.9996, "1.0 s"),
        (4.21, "4.2 s"),
        (59.99, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.9, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (1e6, "12 days"),
    ],
)
def test_times_are_printed_readably(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
    assert format_tokens(131072) == "131,072"
