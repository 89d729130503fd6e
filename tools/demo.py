"""`make demo`: plan, read an 8K-token document, find a fact in it, and ask again without reading it again.

gemma3-270m is a small base model: it continues text and answers no questions, so both questions are the beginnings of
sentences whose end stands in the document.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from longctx import LLM, LongctxError, SamplingParams
from longctx.cli.progress import JobProgress, LoadProgress, Meter, say, stderr_console
from longctx.events import FinishEvent, ProgressEvent
from longctx.units import format_seconds

MODEL = "gemma3-270m"
DOCUMENT_TOKENS = 8192
ANSWER_TOKENS = 8

FILLER = (
    "The grass is green and the sky is blue.",
    "The sun rises in the east and warms the fields.",
    "A light wind moves the leaves of the old trees.",
    "Birds sing in the morning and rest in the evening.",
    "The river runs slowly past the quiet village.",
    "Children play in the garden until it gets dark.",
)


@dataclass(frozen=True)
class Fact:
    """Something said once in the document, at `depth` of it, and how to ask for it."""

    stem: str
    needle: str
    depth: float

    @property
    def sentence(self) -> str:
        return f"{self.stem} {self.needle}."


# Chosen with a margin: sampled at temperature 1, the model still says each of them twelve times out of twelve.
FACTS = (
    Fact("Captain Mirabel Stone keeps her treasure in the city of", "Lisbon", 0.35),
    Fact("Inspector Marlow found the missing diamond inside a", "teapot", 0.70),
)


def build_document(llm: LLM) -> str:
    """Filler with the facts at their depths, cut to exactly DOCUMENT_TOKENS tokens."""
    low, high = 0, DOCUMENT_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(llm.encode(_text(middle, 0))) <= DOCUMENT_TOKENS else (low, middle - 1)
    # A word is one token, so the rest is filled to the token.
    missing = DOCUMENT_TOKENS - len(llm.encode(_text(low, 0)))
    document = _text(low, missing)
    assert len(llm.encode(document)) == DOCUMENT_TOKENS
    return document


def _text(num_sentences: int, num_words: int) -> str:
    sentences = [FILLER[i % len(FILLER)] for i in range(num_sentences)]
    for fact in sorted(FACTS, key=lambda fact: -fact.depth):
        sentences.insert(int(fact.depth * num_sentences), fact.sentence)
    return " ".join([f"It was a{' very' * num_words} calm day.", *sentences])


def ask(llm: LLM, prompt: str) -> FinishEvent:
    """Run one prompt with a progress bar; the answer is printed as it comes."""
    with Meter(stderr_console()) as meter:
        progress = JobProgress(meter)
        for event in llm.stream(prompt, SamplingParams(max_tokens=ANSWER_TOKENS)):
            if isinstance(event, ProgressEvent):
                progress.prefill(event)
            elif isinstance(event, FinishEvent):
                return event
    raise AssertionError("a stream ends with a FinishEvent")


def main() -> int:
    start_s = time.perf_counter()
    say(stderr_console(), f"loading {MODEL} (fetched and converted the first time)")
    with Meter(stderr_console()) as meter:
        llm = LLM(MODEL, progress=LoadProgress(meter), max_running=1)
    with llm:
        document = build_document(llm)
        print(f"\nA document of {DOCUMENT_TOKENS:,} tokens, {len(document):,} characters, with two facts in it.")
        print(f"The plan   {llm.plan(document, max_tokens=32 + ANSWER_TOKENS)}")
        ends, found = [], True
        for number, fact in enumerate(FACTS, start=1):
            print(f"\nQuestion {number}: what continues the document with “{fact.stem}”?", flush=True)
            end = ask(llm, f"{document}\n\n{fact.stem}")
            right = fact.needle in end.text
            found, ends = found and right, [*ends, end]
            print(f"  answer   {end.text.strip()!r}  ({'right' if right else f'WRONG, it is {fact.needle}'})")
            print(f"  cached   {end.usage.cached_tokens:,} of {end.usage.prompt_tokens:,} tokens")
            print(f"  first token after {format_seconds(end.timings.ttft_ms / 1e3)}", flush=True)
    cold_ms, warm_ms = (end.timings.ttft_ms for end in ends)
    print(f"\nThe second question on the same document was answered {cold_ms / warm_ms:,.0f} times sooner.")
    print(f"All of it took {format_seconds(time.perf_counter() - start_s)}.")
    return 0 if found else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LongctxError as error:
        sys.exit(f"error: {error}")
