"""Text to ids: by the tokenizer's rules, in linear time, never cut; templates in a sandbox with bounds."""

from __future__ import annotations

import base64
import random
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from longctx.errors import ModelError
from longctx.server.errors import ApiError
from longctx.server.text_side import TextSide, clip, read_template
from tests.helpers.text_side import CHAT, TOOLS, make_text
from tests.helpers.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

PROSE = "the quick brown fox jumps over the lazy dog. "
UNBROKEN = {
    "letters": "a",
    "dashes": "-",
    "spaces": " ",
    "line ends": "\n",
    "digits": "7",
    "CJK": "界",
    "combining": "e\u0301",
}


def unbroken(name: str, size: int) -> str:
    if name == "base64":
        return base64.b64encode(random.Random(0).randbytes(size)).decode()[:size]
    return (UNBROKEN[name] * size)[:size]


def seconds_per_byte(text: TextSide, source: str) -> float:
    best_s = float("inf")
    for _ in range(2):
        start_s = time.process_time()
        text.encode(source)
        best_s = min(best_s, time.process_time() - start_s)
    return best_s / len(source.encode())


@pytest.mark.parametrize("name", [*UNBROKEN, "base64"])
@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_unbroken_runs_take_linear_time_and_give_the_tokenizers_ids(kind: str, name: str) -> None:
    tokenizer = byte_level_tokenizer() if kind == "byte level" else byte_fallback_tokenizer(strip_first=False)
    text = TextSide(tokenizer, longest=10**6)
    assert seconds_per_byte(text, unbroken(name, 100_000)) <= 5 * seconds_per_byte(text, PROSE * 2200)
    sample = unbroken(name, 20_000)
    assert text.encode(sample).tolist() == tokenizer.backend_tokenizer.encode(sample).ids


@pytest.mark.slow
@pytest.mark.parametrize("name", [*UNBROKEN, "base64"])
def test_a_million_of_the_same_takes_linear_time(name: str) -> None:
    text = make_text(longest=4 * 10**6)
    assert seconds_per_byte(text, unbroken(name, 10**6)) <= 5 * seconds_per_byte(text, PROSE * 22_000)


def test_a_long_text_is_counted_in_pieces_but_tokenized_in_one() -> None:
    text = make_text(longest=1600)
    text.tokenizer.add_tokens(["aVeryLongWord"])
    source = "aVeryLongWord" * 1600
    assert len(source) > 6 * text.longest
    ids = text.encode(source)
    assert len(ids) == 1600 and len(set(ids.tolist())) == 1


def test_a_text_that_is_too_long_is_refused_by_its_beginning() -> None:
    text = make_text(longest=1000)
    exact = len(text.encode(PROSE * 100))
    assert exact > text.longest  # a little too long is the engine's to refuse, which knows max_tokens too
    with pytest.raises(ApiError, match=r"in its first 4,096 of 4,500,000 characters") as caught:
        text.encode(PROSE * 100_000)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    with pytest.raises(ApiError, match="shorten the prompt"):
        text.encode_chat([{"role": "user", "content": PROSE * 100_000}])


def test_counting_pieces_never_refuses_what_fits() -> None:
    for name in UNBROKEN:
        source = unbroken(name, 60_000)
        whole = len(make_text(longest=10**6).encode(source))
        assert len(make_text(longest=whole).encode(source)) == whole


def test_truncation_in_a_tokenizers_file_is_turned_off() -> None:
    backend = Tokenizer.from_str(byte_level_tokenizer().backend_tokenizer.to_str())
    backend.enable_truncation(8)
    backend.enable_padding(length=64)
    text = TextSide(PreTrainedTokenizerFast(tokenizer_object=backend), longest=10**6)
    # At once, since a tokenizer that others decode with must not change under their hands.
    assert text.tokenizer.backend_tokenizer.truncation is None and text.tokenizer.backend_tokenizer.padding is None
    assert len(text.encode("the quick brown fox " * 10)) > 64


def test_decode_spells_special_tokens() -> None:
    text = make_text()
    ids = np.array([0, *text.encode("naïve 東京").tolist(), 1], dtype=np.int32)
    assert text.decode(ids) == "<|start|>naïve 東京<|end|>"


def test_what_a_template_knows_is_read_from_it() -> None:
    assert not make_text(CHAT).traits.tools and make_text(TOOLS).traits.tools
    assert "enable_thinking" in make_text(TOOLS).traits.variables
    sets_it_too = "{% if x is defined %}{% set tools = x %}{% endif %}{% for t in tools %}{{ t }}{% endfor %}"
    assert make_text(sets_it_too).traits.tools
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert "messages" in make_text(marked).traits.variables
    assert make_text(None).traits.variables == frozenset()


def test_a_broken_template_is_refused_at_the_start() -> None:
    for source in ("{% for %}", "{{ messages", "{% if " * 1000):
        with pytest.raises(ModelError, match="no valid jinja template"):
            make_text(source)


def test_a_template_comes_from_a_file_or_as_text(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(CHAT)
    assert read_template(str(path)) == CHAT == read_template(CHAT)
    for bad in (tmp_path / "none.jinja", tmp_path):
        with pytest.raises(ModelError, match="cannot be read"):
            read_template(str(bad))
    path.write_text("  \n")
    with pytest.raises(ModelError, match="must have 1 to"):
        read_template(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="cannot be read"):
        read_template(str(path))


def test_the_servers_template_replaces_the_models() -> None:
    text = TextSide(make_text().tokenizer, 4096, "{{ messages[0].content }}")
    assert text.decode(text.encode_chat([{"role": "user", "content": "alone"}])) == "alone"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({'role': 'x'}) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ (messages|attr('__class__')).__base__.__subclasses__() }}",
        "{{ '%s'|format('{0.__class__}') and '{0.__class__.__base__}'.format(messages).x() }}",
        "{{ raise_exception.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_a_template_reaches_nothing_beyond_its_arguments(attack: str) -> None:
    """What transformers renders templates in must be jinja's immutable sandbox."""
    with pytest.raises(ApiError) as caught:
        make_text(attack).encode_chat([{"role": "user", "content": "hello"}])
    assert caught.value.status == 400


def test_a_template_that_never_ends_is_ended() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    text = make_text(endless, template_s=0.2)
    start_s = time.perf_counter()
    with pytest.raises(ApiError, match=r"more than 0\.2 s"):
        text.encode_chat([{"role": "user", "content": "hello"}])
    assert time.perf_counter() - start_s < 20
    text.tokenizer.chat_template = CHAT
    assert len(text.encode_chat([{"role": "user", "content": "hello"}]))


def test_a_template_that_writes_too_much_is_refused() -> None:
    loud = "{% for i in range(3000) %}{{ messages[0].content }}{% endfor %}"
    assert len(make_text(loud, longest=10**7).encode_chat([{"role": "user", "content": "a" * 10}]))
    with pytest.raises(ApiError, match="characters of these messages"):
        make_text(loud, longest=10**7).encode_chat([{"role": "user", "content": "a" * 1000}])


def test_clip_makes_one_printable_line() -> None:
    assert clip("a\r\n\x1b[31mb\u202e", 100) == "a   [31mb "
    assert clip("x" * 50, 10) == "x" * 7 + "..." and clip("x" * 10, 10) == "x" * 10
