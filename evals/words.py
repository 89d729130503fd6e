"""Words that suites make their material from: plain, distinct, none a part of another's meaning here."""

from __future__ import annotations

import random

_NOUNS = """
anchor apple arrow badge basket bell bench bottle bowl branch brick broom brush bucket button cable candle
carpet castle chair chalk cherry clock cloud coat coin compass copper cotton crayon curtain desk diamond dish
donkey door drum eagle engine envelope fabric feather fence ferry flag flute fork fountain frog garlic gate
ginger glove goat grape guitar hammer harp hazel helmet honey horn hotel ink iron island ivory jacket jar jewel
kettle kite knife ladder lamp lantern leaf lemon lens letter lily lizard magnet maple marble mask meadow melon
mirror moon mustard nail napkin needle nest olive onion orange organ otter oven owl paddle palm paper parrot
pearl pebble pencil pepper piano pillow pipe plate plum pocket pony pot pumpkin quilt rabbit radio ribbon river
robe rocket rope rose saddle sail salt sandal scarf shell shovel silver slipper soap spoon stamp steam stone
sugar table tailor temple thread tiger tomato torch towel tractor tulip tunnel turtle umbrella vase velvet
violin wagon walnut wheel whistle willow window wool yarn zebra
"""

_NAMES = """
Ada Albert Alma Anton Basil Bella Bruno Carla Cedric Clara Conrad Daphne Dorothy Edgar Elsa Emil Esther Felix
Flora Frida Gregor Greta Hanna Hector Hugo Ida Igor Irene Jasper Judith Julius Karin Klaus Laura Leo Lydia
Magnus Martha Max Mira Nadia Nora Oscar Otto Paula Philip Quentin Rita Robert Rosa Samuel Selma Simon Sophie
Stella Thomas Ursula Victor Vera Walter Wanda Xenia Yvonne Zoe
"""

_CITIES = """
Athens Bergen Berlin Boston Bremen Cairo Chicago Dakar Denver Dublin Geneva Hamburg Havana Helsinki Istanbul
Kyoto Lagos Lima Lisbon London Lyon Madrid Melbourne Milan Montreal Moscow Munich Nairobi Naples Oslo Ottawa
Oxford Paris Porto Prague Quito Riga Rome Sydney Tokyo Toronto Turin Venice Vienna Warsaw Zurich
"""

NOUNS, NAMES, CITIES = (tuple(text.split()) for text in (_NOUNS, _NAMES, _CITIES))

COUNTABLE = tuple(
    noun
    for noun in NOUNS
    if not noun.endswith(("s", "x", "ch", "sh", "y", "fe", "f", "o"))
    and noun
    not in ("cotton", "fabric", "garlic", "honey", "ink", "ivory", "iron", "paper", "salt", "soap", "wool", "yarn")
)
"""Nouns whose plural is the noun with an s."""

FILLER = (
    "The grass is green and the sky is blue.",
    "The sun rises in the east and warms the fields.",
    "A light wind moves the leaves of the old trees.",
    "Birds sing in the morning and rest in the evening.",
    "Water runs slowly past the quiet village.",
    "Children play outside until it gets dark.",
)


def coined_words(rng: random.Random, count: int) -> list[str]:
    """`count` distinct pronounceable words that mean nothing."""
    found: dict[str, None] = {}
    while len(found) < count:
        word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))
        found.setdefault(word)
    return list(found)


def filler(count: int) -> list[str]:
    """`count` sentences in which nothing happens."""
    return (list(FILLER) * (count // len(FILLER) + 1))[:count]


def scattered(rng: random.Random, inserts: list[str], count: int) -> list[str]:
    """`inserts`, in their order, at random places between `count` sentences of filler."""
    sentences = filler(count)
    for place, insert in zip(sorted(rng.randint(0, count) for _ in inserts)[::-1], inserts[::-1], strict=True):
        sentences.insert(place, insert)
    return sentences
