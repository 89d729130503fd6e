"""Incremental detokenizing: deltas joined are the full decode, characters come whole, cost does not grow."""

from __future__ import annotations

import codecs
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.detokenize import IncrementalDetokenizer
from longctx.stop import StopMatcher
from tests.helpers.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, unigram_tokenizer

TOKENIZERS = {
    "byte_level": byte_level_tokenizer(),
    "byte_fallback_stripped": byte_fallback_tokenizer(strip_first=True),
    "byte_fallback": byte_fallback_tokenizer(strip_first=False),
    "unigram": unigram_tokenizer(),
}
BYTE_TOKENIZERS = [name for name in TOKENIZERS if name != "unigram"]
CHARACTERS = {
    "four-byte emoji": "a🦜b",
    "zwj family": "👩‍👩‍👧‍👦",
    "flag and skin tone": "🇩🇪👍🏽",
    "devanagari": "नमस्ते दुनिया",
    "cjk": "你好，世界",
    "combining": "e\u0301é",
    "replacement character itself": "a\ufffdb",
}


def deltas(tokenizer, ids, skip=True):
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return [detokenizer.add(i) for i in ids] + [detokenizer.finish()]


def full(tokenizer, ids, skip=True):
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def byte_ids(tokenizer, data: bytes) -> list[int]:
    """One token per byte, whatever the merges are: the hardest way a model can write a text."""
    tokens = tokenizer.get_vocab()
    if "<0x00>" in tokens:
        return [tokens[f"<0x{byte:02X}>"] for byte in data]
    alphabet = dict(zip(_bytes_in_gpt2_order(), _gpt2_characters(), strict=True))
    return [tokens[alphabet[byte]] for byte in data]


def _bytes_in_gpt2_order():
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [*kept, *(b for b in range(256) if b not in kept)]


def _gpt2_characters():
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [*map(chr, kept), *(chr(256 + i) for i in range(256 - len(kept)))]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["the key is open", " the  key", *CHARACTERS.values()])
def test_joined_deltas_are_the_full_decode(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(deltas(tokenizer, ids)) == full(tokenizer, ids)


@pytest.mark.parametrize("name", BYTE_TOKENIZERS)
@pytest.mark.parametrize("text", CHARACTERS.values(), ids=CHARACTERS.keys())
def test_characters_arrive_whole(name, text):
    """B95: emoji, CJK and accents arrived as U+FFFD (waybarrios/vllm-mlx#109, exo-explore/exo#1691,
    RunanywhereAI/runanywhere-sdks#848), since each token was decoded alone."""
    tokenizer = TOKENIZERS[name]
    pieces = deltas(tokenizer, byte_ids(tokenizer, text.encode()))
    assert [piece for piece in pieces if piece] == list(text), "each character, at its last byte, and nothing else"


@pytest.mark.parametrize("name", BYTE_TOKENIZERS)
@pytest.mark.parametrize("tail", ["🦜", "你", "é"])
def test_an_incomplete_character_before_text(name, tail):
    """B96: pending bytes were destroyed by a token that begins with a space (Blaizzy/mlx-vlm#1778)."""
    tokenizer = TOKENIZERS[name]
    data = tail.encode()
    for cut in range(1, len(data)):
        ids = byte_ids(tokenizer, tail.encode() + data[:cut])
        ids += tokenizer(" x", add_special_tokens=False)["input_ids"]
        text = "".join(deltas(tokenizer, ids))
        assert text.replace(" ", "") == f"{tail}\ufffdx", "complete: lossless; the broken sequence: one U+FFFD"


@pytest.mark.parametrize("name", BYTE_TOKENIZERS)
@pytest.mark.parametrize("with_eos", [True, False], ids=["eos", "max_tokens"])
def test_an_incomplete_character_at_the_end(name, with_eos):
    """B96 (Blaizzy/mlx-vlm#1778): at EOS or max_tokens whole characters are kept, invalid bytes replaced once."""
    tokenizer = TOKENIZERS[name]
    ids = byte_ids(tokenizer, "你好".encode()[:-1])
    if with_eos:
        ids.append(tokenizer.eos_token_id)
    pieces = deltas(tokenizer, ids)
    assert "".join(pieces[:-1]) == "你", "nothing is decided before the end"
    assert pieces[-1] == "\ufffd"


@pytest.mark.parametrize("name", BYTE_TOKENIZERS)
def test_an_incomplete_character_before_a_stop_string(name):
    """B96 (Blaizzy/mlx-vlm#1778): a stop string cuts the text, the broken sequence before it is replaced once."""
    tokenizer = TOKENIZERS[name]
    ids = byte_ids(tokenizer, "你".encode() + "好".encode()[:2] + b"STOP" + "你".encode())
    matcher, shown, hit = StopMatcher(("STOP",)), "", False
    for piece in deltas(tokenizer, ids):
        safe, hit = matcher.add(piece)
        shown += safe
        if hit:
            break
    assert (shown, hit) == ("你\ufffd", True)


@pytest.mark.parametrize("name", ["byte_level", "unigram"])
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_tokens(name, data, skip):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=12))
    assert "".join(deltas(tokenizer, ids, skip)) == full(tokenizer, ids, skip)


@pytest.mark.parametrize("name", ["byte_fallback_stripped", "byte_fallback"])
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_tokens_with_byte_fallback(name, data, skip):
    """As the full decode, except that a broken run of bytes keeps its complete characters."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=12))
    if skip:
        ids = [i for i in ids if i not in tokenizer.all_special_ids]
    expected, broken = _decode_runs(tokenizer, ids, skip)
    assert "".join(deltas(tokenizer, ids, skip)) == expected
    if not broken:
        assert expected == full(tokenizer, ids, skip)


def _decode_runs(tokenizer, ids, skip):
    """The whole text at once: runs of bytes as UTF-8, other tokens by the tokenizer behind a lone byte token."""
    first_byte = tokenizer.get_vocab()["<0x00>"]
    known = [i for i in ids if i < len(tokenizer)]
    text, broken = "", False
    for is_byte, run in itertools.groupby(known, key=lambda i: first_byte <= i < first_byte + 256):
        run = list(run)
        if is_byte:
            data = bytes(i - first_byte for i in run)
            part = data.decode("utf-8", "replace")
            broken = broken or part != data.decode("utf-8", "ignore")
        else:
            part = full(tokenizer, [first_byte, *run], skip)[1:]
        text += part
    if full(tokenizer, [first_byte + 0x20], skip) == "" and text.startswith(" "):
        text = text[1:]  # this decoder strips one space at the very start
    return text, broken


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_are_left_out_or_shown(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer("the<|end|> key<|start|>", add_special_tokens=False)["input_ids"]
    for skip in (True, False):
        text = "".join(deltas(tokenizer, ids, skip))
        assert text == full(tokenizer, ids, skip)
        assert ("<|end|>" in text) is not skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_cost_of_a_token_does_not_grow(name, monkeypatch):
    """B97: time per output token grew with the output (vllm-project/vllm#24174, #1099, huggingface/candle#3782).

    20,000 tokens with four stop strings, counted in tokens decoded and bytes pending instead of in seconds.
    """
    tokenizer = TOKENIZERS[name]
    decoded = 0
    decode = type(tokenizer).decode

    def counting(self, ids, **kwargs):
        nonlocal decoded
        decoded += len(ids)
        return decode(self, ids, **kwargs)

    monkeypatch.setattr(type(tokenizer), "decode", counting)
    ids = [(i * 7919) % len(tokenizer) for i in range(20_000)]
    detokenizer, matcher = IncrementalDetokenizer(tokenizer), StopMatcher(("never", "the end", "zzzz", "\n\n\n\n"))
    shown, costs = [], []
    for token_id in ids:
        before = decoded
        text, hit = matcher.add(detokenizer.add(token_id))
        shown.append(text)
        assert not hit
        costs.append(decoded - before)
    shown += [matcher.add(detokenizer.finish())[0], matcher.finish()]
    assert sum(costs[-1000:]) <= 2 * sum(costs[:1000]), (sum(costs[:1000]), sum(costs[-1000:]))
    assert max(costs) <= 6, "no token decodes more than itself and its predecessor, for a bounded number of questions"
    if name in ("byte_level", "unigram"):
        monkeypatch.undo()
        assert "".join(shown) == full(tokenizer, ids)


def test_replacement_follows_the_standard():
    """The reference for broken bytes: one U+FFFD per maximal broken sequence, as decoders of byte-level BPE do it."""
    tokenizer = TOKENIZERS["byte_level"]
    data = b"\xf0\x9f\xa6\xf0\x9fA\xff\xe4\xbd"
    ids = byte_ids(tokenizer, data)
    assert "".join(deltas(tokenizer, ids)) == full(tokenizer, ids) == codecs.decode(data, "utf-8", "replace")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_token_is_spelled_by_its_own_bytes(name):
    """waybarrios/vllm-mlx#109: tokens that are half a character need their bytes, which replacement loses."""
    tokenizer = TOKENIZERS[name]
    for text in ("the key", "é今x" if name != "unigram" else "é", " the"):
        detokenizer, spelled = IncrementalDetokenizer(tokenizer), b""
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            before = detokenizer.spell(token_id)
            assert before == detokenizer.spell(token_id), "spelling takes nothing"
            spelled += before
            detokenizer.add(token_id)
        expected = full(tokenizer, tokenizer.encode(text, add_special_tokens=False))
        assert spelled.decode().replace("<unk>", "") == expected.replace("<unk>", "")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_are_spelled_by_name(name):
    tokenizer = TOKENIZERS[name]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.spell(tokenizer.eos_token_id) == b"<|end|>"
    assert detokenizer.spell(len(tokenizer) + 50) == b""
