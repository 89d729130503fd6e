"""Needle in a haystack: what is hidden, what is asked, and the prompts that do it at an exact length and depth."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from longctx.errors import LongctxError
from longctx.evals.haystack import Haystack
from longctx.evals.lengths import Fitter

NAMES = tuple(
    f"{first} {second}"
    for second in ("gate", "tower", "bridge", "cellar", "garden", "chapel", "bakery", "museum", "station", "lodge")
    for first in ("harbour", "mountain", "river", "forest", "castle", "island", "market", "desert", "winter", "valley")
)
"""Things that have a number; common words, so that a small model has heard of them."""

_ASK = "Here is a{} short question about it."
_HEAD = "Something special is hidden in the following{} long text. Remember it: you will be asked about it afterwards."


@dataclass(frozen=True)
class Needle:
    """A sentence that is hidden at `depth` of the haystack, 0 its front and 1 its end."""

    sentence: str
    depth: float


@dataclass(frozen=True)
class Hunt:
    """One drawn problem: what is hidden, what is asked, which facts the answer must have.

    `stem` begins the answer for a model that continues text instead of answering questions.
    """

    needles: tuple[Needle, ...]
    question: str
    stem: str
    facts: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """A kind of hunt. `draw(random, depth)` hides the first fact asked for at `depth`; same random, same hunt.

    `answer_tokens` has room for a model that repeats the question before it answers, a token for each digit.
    """

    name: str
    summary: str
    answer_tokens: int
    draw: Callable[[random.Random, float], Hunt]


@dataclass(frozen=True)
class HuntPrompt:
    """The text to send, its tokens as the model reads it, and where its needles came to stand."""

    text: str
    tokens: int
    depths: tuple[float, ...]


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10_000, 100_000))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _distinct(draw: Callable[[random.Random], str], rng: random.Random, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        value = draw(rng)
        if value not in found:
            found.append(value)
    return found


def _one_of(name: str, number: str) -> str:
    return f"The special number of the {name} is {number}."


def _ask(name: str) -> tuple[str, str]:
    return f"What is the special number of the {name}?", f" The special number of the {name} is"


def _spread(depth: float, count: int) -> list[float]:
    """`count` depths, evenly from `depth` on to the end, then on from the front."""
    return [depth, *((depth + (1.0 if depth < 1.0 else 0.999) * i / count) % 1.0 for i in range(1, count))]


def _single(rng: random.Random, depth: float) -> Hunt:
    name, number = rng.choice(NAMES), _number(rng)
    return Hunt((Needle(_one_of(name, number), depth),), *_ask(name), (number,))


def _multi_key(rng: random.Random, depth: float) -> Hunt:
    names, numbers = rng.sample(NAMES, 8), _distinct(_number, rng, 8)
    depths = [depth, *(rng.random() for _ in names[1:])]
    needles = [Needle(_one_of(*pair), at) for *pair, at in zip(names, numbers, depths, strict=True)]
    return Hunt(tuple(needles), *_ask(names[0]), (numbers[0],))


def _multi_value(rng: random.Random, depth: float) -> Hunt:
    name, numbers = rng.choice(NAMES), _distinct(_number, rng, 4)
    sentences = [f"One of the special numbers of the {name} is {number}." for number in numbers]
    needles = tuple(Needle(*pair) for pair in zip(sentences, _spread(depth, 4), strict=True))
    question = f"What are all four special numbers of the {name}?"
    return Hunt(needles, question, f" The four special numbers of the {name} are", tuple(numbers))


def _multi_needle(rng: random.Random, depth: float) -> Hunt:
    names, numbers = rng.sample(NAMES, 3), _distinct(_number, rng, 3)
    needles = [Needle(_one_of(*pair), at) for *pair, at in zip(names, numbers, _spread(depth, 3), strict=True)]
    listed = f"the {names[0]}, the {names[1]} and the {names[2]}"
    question = f"What are the special numbers of {listed}?"
    return Hunt(tuple(needles), question, f" The special numbers of {listed} are", tuple(numbers))


def _uuids(rng: random.Random, depth: float) -> Hunt:
    keys, values = _distinct(_uuid, rng, 4), _distinct(_uuid, rng, 4)
    depths = [depth, *(rng.random() for _ in keys[1:])]
    needles = [
        Needle(f"The value of the key {key} is {value}.", at)
        for key, value, at in zip(keys, values, depths, strict=True)
    ]
    return Hunt(
        tuple(needles), f"What is the value of the key {keys[0]}?", f" The value of the key {keys[0]} is", (values[0],)
    )


def _distractors(rng: random.Random, depth: float) -> Hunt:
    name, (right, *wrong) = rng.choice(NAMES), _distinct(_number, rng, 5)
    place, thing = name.split()
    other = next(n for n in rng.sample(NAMES, len(NAMES)) if n.split()[0] == place and n.split()[1] != thing)
    lures = (
        f"The special number of the {other} is {wrong[0]}.",
        f"The telephone number of the {name} is {wrong[1]}.",
        f"Before it was changed, people had to remember the number {wrong[2]} at the {name}.",
        f"Somebody guessed that the number {wrong[3]} would open the {name}, and it did not.",
    )
    needles = (Needle(_one_of(name, right), depth), *(Needle(lure, rng.random()) for lure in lures))
    return Hunt(needles, *_ask(name), (right,))


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("single", "one five-digit number", 24, _single),
        Variant("multi-key", "one number among eight that belong to other names", 24, _multi_key),
        Variant("multi-value", "four numbers of one name, all of them asked for", 48, _multi_value),
        Variant("multi-needle", "three numbers of three names, all of them asked for", 48, _multi_needle),
        Variant("uuid", "the UUID that belongs to a UUID, among four pairs", 64, _uuids),
        Variant("distractors", "one number beside four sentences that resemble its own", 24, _distractors),
    )
}


def draw(variant: Variant, seed: int, length: int, depth: float, sample: int, haystack: Haystack) -> Hunt:
    """The hunt of one cell: the same for the same arguments, and no fact of it stands in the haystack already."""
    for attempt in range(100):
        hunt = variant.draw(random.Random(f"{seed}/{length}/{depth:.6f}/{sample}/{attempt}"), depth)
        if not any(haystack.mentions(fact) for fact in hunt.facts):
            return hunt
    raise LongctxError(f"--haystack {haystack.name} holds every number there is: choose another")


class PromptMaker:
    """Makes prompts of exact length around one haystack; `chat` leaves the answer's stem out.

    Padding words stand in the first line, far from the question; with `pad_last` right before the question, so that
    prompts of a length begin alike and can share cached blocks.
    """

    def __init__(self, haystack: Haystack, fitter: Fitter, chat: bool, pad_last: bool = False):
        self._haystack = haystack
        self._fitter = fitter
        self._chat = chat
        self._pad_last = pad_last

    def make(self, hunt: Hunt, target: int, hide: bool = True) -> HuntPrompt:
        """A prompt of at most `target` tokens, and as near to it as a word of padding can bring it.

        Needles stand at the sentence border nearest to their depth in tokens. `hide` False leaves them out: the
        control. Raises `LongctxError` where the question alone is longer.
        """
        needles = hunt.needles if hide else ()
        guess = self._fitter.fit(lambda size, padding: self._by_sentences(hunt, needles, size, padding), target)
        # The needles moved from a place by sentences to one by tokens: a merge at a border may cost a token or two.
        for size in range(guess.size, -1, -1):
            places, depths = self._places(needles, size)
            text = self._text(hunt, needles, places, size, 0)
            tokens = self._fitter.count(text)
            if tokens > target:
                continue
            padded = partial(self._text, hunt, needles, places, size)
            padding, tokens = self._fitter.largest(padded, target, target - tokens)
            return HuntPrompt(padded(padding), tokens, depths)
        raise AssertionError("a haystack of no sentences fitted before")

    def _by_sentences(self, hunt: Hunt, needles: Sequence[Needle], size: int, padding: int) -> str:
        return self._text(hunt, needles, [round(needle.depth * size) for needle in needles], size, padding)

    def _places(self, needles: Sequence[Needle], size: int) -> tuple[list[int], tuple[float, ...]]:
        """Before which sentence each needle goes, and what depth in tokens that is."""
        if size == 0 or not needles:
            return [0 for _ in needles], tuple(0.0 for _ in needles)
        sentences = self._haystack.take(size)

        def front(count: int) -> str:
            return f"{_HEAD.format('')}\n\n{self._haystack.joiner.join(sentences[:count])}"

        empty = self._fitter.count(front(0))
        total = max(1, self._fitter.count(front(size)) - empty)
        places, depths = [], []
        for needle in needles:
            wanted = needle.depth * total
            place, tokens = self._fitter.largest(front, empty + int(wanted), round(needle.depth * size), size)
            tokens -= empty
            if place < size:
                after = self._fitter.count(front(place + 1)) - empty
                if after - wanted < wanted - tokens:
                    place, tokens = place + 1, after
            places.append(place)
            depths.append(tokens / total)
        return places, tuple(depths)

    def _text(self, hunt: Hunt, needles: Sequence[Needle], places: Sequence[int], size: int, padding: int) -> str:
        sentences = self._haystack.take(size)
        order = sorted(range(len(needles)), key=lambda i: places[i])
        for i in reversed(order):
            sentences.insert(places[i], needles[i].sentence)
        words = " very" * padding
        head = _HEAD.format("" if self._pad_last else words)
        ask = f"{_ASK.format(words)} {hunt.question}" if self._pad_last else hunt.question
        stem = "" if self._chat else hunt.stem
        return f"{head}\n\n{self._haystack.joiner.join(sentences)}\n\n{ask}{stem}"
