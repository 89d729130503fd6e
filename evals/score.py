"""Whether an answer has the facts it should have, and what kind of miss it is otherwise. No judge, no wording."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

FOUND, PARTIAL = "found", "partial"
NOT_IN_PROMPT, TRUNCATED, EMPTY, REFUSED, WRONG = "not_in_prompt", "truncated", "empty", "refused", "wrong"
OUTCOMES = (FOUND, PARTIAL, NOT_IN_PROMPT, TRUNCATED, EMPTY, REFUSED, WRONG)
"""`not_in_prompt`: the suite's own mistake; `truncated`: prompt or answer was cut; `partial`: some of several facts."""

_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:[,'\u2019\u2009\u202f\u00a0]\d{3})+(?!\d)")
_JOINER = re.compile(r"[,'\u2019\u2009\u202f\u00a0]")
_NUMBER = re.compile(r"(?<![^\W_])(?<!\d\.)\d+(?:\.\d+)?(?![^\W_])")
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"))

_REFUSALS = re.compile(
    r"\b(?:i (?:can not|cannot|can't|am not able|am unable|am sorry|do not know|don't know|could not find)"
    r"|i couldn't find|i'm (?:not able|unable|sorry)|sorry|unfortunately|as an ai|not possible|not enough information"
    r"|(?:is|are|was|were) not (?:mentioned|given|provided|specified|stated|contained)"
    r"|(?:does|did)(?: not|n't) (?:mention|contain|say|give|include|provide|specify)|no (?:information|mention))\b"
)


@dataclass(frozen=True)
class Verdict:
    """`score` is the share of the facts that were found, `outcome` one of `OUTCOMES`."""

    score: float
    outcome: str


def has_fact(fact: str, text: str) -> bool:
    """Whether `fact` stands in `text` as a token of its own, whatever is said around it.

    Letters or digits that touch it make it another token: 7481 is neither in "17481x" nor in "7481.5". A number is
    itself with thousands separators; words are compared without case, and any white space is one space.
    """
    fact, text = _normal(fact), _normal(text)
    if fact.isdigit():
        return fact in _numbers(text)
    # A hyphen beside a hyphenated code would go on: half a UUID is not the UUID.
    edge = r"[^\W_]" + ("|-(?=\\w)" if "-" in fact else "")
    before = r"(?<![^\W_])" + (r"(?<!\w-)" if "-" in fact else "")
    return re.search(f"{before}{re.escape(fact)}(?!{edge})", text) is not None


def judge(
    facts: Sequence[str],
    text: str,
    *,
    in_prompt: bool = True,
    prompt_cut: bool = False,
    answer_cut: bool = False,
    ordered: bool = False,
) -> Verdict:
    """Score an answer by the share of `facts` it has; `ordered` counts only facts (single words) in this order.

    `in_prompt`: the needles were in the text that was sent. `prompt_cut`: the server read less than that. `answer_cut`:
    the answer ended because its room did.
    """
    assert facts, "nothing is asked for"
    score = _in_order(facts, text) if ordered else sum(has_fact(fact, text) for fact in facts) / len(facts)
    if score == 1.0:
        return Verdict(1.0, FOUND)
    if not in_prompt:
        return Verdict(score, NOT_IN_PROMPT)
    if prompt_cut or (answer_cut and _breaks_off(facts, text)):
        return Verdict(score, TRUNCATED)
    if score > 0.0:
        return Verdict(score, PARTIAL)
    if not _normal(text):
        return Verdict(0.0, EMPTY)
    return Verdict(0.0, REFUSED if _REFUSALS.search(_normal(text)) else WRONG)


def _in_order(facts: Sequence[str], text: str) -> float:
    """The longest run of facts, begun with the first, that follow each other in the text; as a share."""
    text, at, count = _normal(text), 0, 0
    for fact in facts:
        found = next((m.end() for m in _tokens(text, at) if has_fact(fact, m.group())), None)
        if found is None:
            break
        at, count = found, count + 1
    return count / len(facts)


def _tokens(text: str, start: int) -> list[re.Match[str]]:
    return list(re.compile(r"[^\W_]+(?:-[^\W_]+)*").finditer(text, start))


def _breaks_off(facts: Sequence[str], text: str) -> bool:
    """Whether the text ends inside a fact that it has begun to say."""
    text = _normal(text)
    for fact in map(_normal, facts):
        for length in range(len(fact) - 1, 1, -1):
            if text.endswith(fact[:length]):
                before = text[: len(text) - length][-1:]
                return not before or not before.isalnum()
    return False


def _numbers(text: str) -> set[str]:
    plain = _GROUPED.sub(lambda match: _JOINER.sub("", match.group()), text)
    return set(_NUMBER.findall(plain))


def _normal(text: str) -> str:
    """Composed, lower case, invisible characters gone, white space single; thousands separators kept as they are."""
    text = text.translate(_INVISIBLE)
    joined = _GROUPED.sub(lambda match: _JOINER.sub(",", match.group()), text)
    return " ".join(unicodedata.normalize("NFKC", joined).casefold().split())
