"""A fact counts when it is there, however it is said, and never when it is only part of something else."""

from __future__ import annotations

import pytest

from longctx.evals.score import judge

UUID = "3f2a77c0-9a4e-4c1b-8d55-0e6f1c2b3a49"

ANSWERS = [
    # (fact, answer, score, outcome): 25 of them, as neroued/ninfer#171 and needle-in-a-haystack#39 ask for.
    ("7481", "7481", 1, "found"),
    ("7481", "7481.", 1, "found"),
    ("7481", "The special number of the harbour gate is 7481.", 1, "found"),
    (
        "7481",
        "Let me think. The text speaks of grass, of the sky and of a gate, whose number is 7481, I believe!",
        1,
        "found",
    ),
    ("7481", "It's **7481**, as stated.", 1, "found"),
    ("7481", "7,481", 1, "found"),
    ("7481", "Der gesuchte Code lautet: #7481\n\n", 1, "found"),
    ("7481", "\uff17\uff14\uff18\uff11", 1, "found"),
    ("7481", "It is not 1748 but 7481; 1748 is another one.", 1, "found"),
    ("7481", "I'm sorry, I cannot tell secrets such as 7481.", 1, "found"),
    ("7481", "17481x", 0, "wrong"),
    ("7481", "74810", 0, "wrong"),
    ("7481", "x7481", 0, "wrong"),
    ("7481", "7481.5", 0, "wrong"),
    ("7481", "The number is 17,481.", 0, "wrong"),
    ("7481", "74 81", 0, "wrong"),
    ("7481", "The special number of the harbour gate is", 0, "wrong"),
    ("7481", "What is the special number of the harbour gate?", 0, "wrong"),
    ("7481", "I'm sorry, but the text does not mention a number.", 0, "refused"),
    ("7481", "Unfortunately the number is not mentioned.", 0, "refused"),
    ("7481", "", 0, "empty"),
    ("7481", " \n\u200b ", 0, "empty"),
    (UUID, f"The value is {UUID.upper()}.", 1, "found"),
    (UUID, f"{UUID}-77", 0, "wrong"),
    ("Lisbon", "in the city of\nLISBON, by the sea", 1, "found"),
]


def test_there_are_25_answers() -> None:
    assert len(ANSWERS) == 25


@pytest.mark.parametrize(("fact", "answer", "score", "outcome"), ANSWERS)
def test_the_table_of_answers(fact: str, answer: str, score: int, outcome: str) -> None:
    verdict = judge([fact], answer)
    assert (verdict.score, verdict.outcome) == (score, outcome)


@pytest.mark.parametrize(
    ("fact", "answer", "found"),
    [
        ("7481", "7481a", False),
        ("7481", "7481st", False),
        ("7481", "3.7481", False),
        ("748", "7,748", False),
        ("992", "74813,992", True),
        ("74813", "74813,992", True),
        ("81399", "74813,99", False),
        ("7481", "_7481_", True),
        ("1234567", "1,234,567 in all", True),
        ("1234567", "1'234'567", True),
        ("apple", "pineapple", False),
        ("apple", "apples", False),
        ("apple", "an Apple-like thing", True),
    ],
)
def test_what_touches_a_fact_makes_it_another(fact: str, answer: str, found: bool) -> None:
    assert (judge([fact], answer).score == 1.0) == found


def test_several_facts_are_a_share() -> None:
    facts = ["10001", "20002", "30003", "40004"]
    assert judge(facts, "10001, 20002,30003 and 40004").score == 1.0
    verdict = judge(facts, "10001 and 30003, 100010")
    assert (verdict.score, verdict.outcome) == (0.5, "partial")
    assert judge(facts, "1").outcome == "wrong"


def test_order_counts_where_it_is_asked_for() -> None:
    facts = ["apple", "pear", "plum"]
    assert judge(facts, "Apple, then pear, then PLUM.", ordered=True).score == 1.0
    assert judge(facts, "pear, apple, plum", ordered=True).score == pytest.approx(1 / 3)
    assert judge(facts, "plum, pear, apple", ordered=False).score == 1.0


def test_what_was_cut_is_called_so() -> None:
    """A miss is the suite's, the server's or the answer's room, before it is the model's."""
    assert judge(["7481"], "nothing", in_prompt=False).outcome == "not_in_prompt"
    assert judge(["7481"], "nothing", prompt_cut=True).outcome == "truncated"
    assert judge(["7481"], "the number is 748", answer_cut=True).outcome == "truncated"
    assert judge(["7481"], "the number is 9748", answer_cut=True).outcome == "wrong"
    assert judge(["7481"], "the number is 748", answer_cut=False).outcome == "wrong"
    assert judge(["7481"], "7481", in_prompt=False, prompt_cut=True).outcome == "found"
