"""The suite `drift`: what narrower formats of the cache and of the weights change, measured on the user's own model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from longctx import LLM, machine
from longctx.drift_note import Measured, NoteKey, save_note
from longctx.errors import EngineError, LongctxError
from longctx.evals.drift_answers import GREEDY_TOKENS, PROMPTS, TASK, ask_needles, ask_tasks, write_greedy
from longctx.evals.drift_baseline import Baseline
from longctx.evals.drift_html import drift_page
from longctx.evals.drift_report import ANSWERS, CONTROL, EXACT, GREEDY, TEXT, make_report, table_text
from longctx.evals.drift_text import DECODE_TOKENS, Text, make_text
from longctx.evals.grid import Records
from longctx.evals.haystack import open_haystack
from longctx.evals.reference import ENGINE_ERROR, LOSSY, OK, TOLERANCE, Reference
from longctx.evals.run import check_job, finish, open_store, run_config
from longctx.evals.suite import EvalJob, Suite, lengths_of
from longctx.evals.target import LLMTarget, Target
from longctx.evals.tasks.registry import TASKS
from longctx.units import format_bytes

HAYSTACK = "docs"
DEFAULT_FORMATS, DEFAULT_TOKENS = ("int8",), 2048
LEAST_TOKENS = 64
SECOND_COPY = 1.3
"""Of the weights' bytes must be free for Hugging Face's copy and its work."""


def run(job: EvalJob, target: Target) -> dict[str, Any]:
    """The report. `target` is exact: fp32 KV and whole weights. Raises `LongctxError` for what cannot be compared."""
    check_job(job, target, SUITE)
    lengths = lengths_of(job, target)
    if job.lengths is None:
        lengths = [n for n in lengths if n <= DEFAULT_TOKENS][-1:] or lengths[:1]
    if lengths[0] < LEAST_TOKENS:
        raise LongctxError(f"--lengths {lengths[0]} is too short to compare anything: give at least {LEAST_TOKENS}")
    if not isinstance(target, LLMTarget):
        raise LongctxError("eval drift compares engines in this process: give a MODEL instead of --url")
    formats = job.kv_formats or DEFAULT_FORMATS
    haystack = open_haystack(job.haystack or HAYSTACK)
    config = run_config(job, target, SUITE, lengths, job.names or SUITE.default) | {
        "kv_formats": list(formats),
        "weights_mode": job.weights,
        "depths": None if job.depths is None else list(job.depths),
        "haystack": {"name": haystack.name, "digest": haystack.digest},
        "decode_tokens": DECODE_TOKENS,
        "greedy_tokens": job.max_tokens or GREEDY_TOKENS,
        "prompts": list(PROMPTS),
    }
    with open_store(job, config) as store, ExitStack() as stack:
        comparison = _Comparison(job, target, store, stack)
        for length in lengths:
            control = job.control == "all" or (job.control == "one" and length == lengths[0])
            comparison.compare(formats, make_text(target.llm, haystack, length), control=control)
        comparison.write(formats)
        report = finish(job, make_report(store.records, config), drift_page)
    _note(report)
    return report


class _Comparison:
    """One run's work, piece by piece: what the store holds already is not done again. One other engine at a time."""

    def __init__(self, job: EvalJob, exact: LLMTarget, store: Records, stack: ExitStack):
        self._job, self._exact, self._store, self._stack = job, exact, store, stack
        self._narrow: LLM | None = None

    def compare(self, formats: Sequence[str], text: Text, *, control: bool) -> None:
        """Everything about one text's length: Hugging Face, then each format's logits, then each one's answers."""
        length = len(text.ids)
        missing = [name for name in formats if self._find(TEXT, name, length) is None]
        control = control and self._find(CONTROL, EXACT, length) is None
        if missing or control:
            self._job.say(f"{length:,} tokens: the exact run, {text.decode:,} of them decoded one by one")
            baseline = Baseline(self._exact.llm, text)
            if control:
                self._control(baseline, length)
            for name in missing:
                with self._engine(name) as other:
                    self._distance(baseline, other, name, length)
        if self._find(ANSWERS, EXACT, length) is None:
            self._answer(self._exact, EXACT, length)
        for name in formats:
            if self._find(ANSWERS, name, length) is None and not self._broken(name):
                with self._engine(name) as other:
                    self._answer(other, name, length)

    def write(self, formats: Sequence[str]) -> None:
        """Greedy texts of the exact run and of each format."""
        if self._find(GREEDY, EXACT) is None:
            self._write(self._exact, EXACT)
        for name in formats:
            if self._find(GREEDY, name) is None and not self._broken(name):
                with self._engine(name) as other:
                    self._write(other, name)

    @contextmanager
    def _engine(self, kv_format: str) -> Iterator[LLMTarget]:
        """An engine of this format over the exact one's weights, or over the narrower ones that are compared."""
        base = self._exact.llm
        if self._job.weights is not None:
            if self._narrow is None:
                self._job.say(f"loading the weights in {self._job.weights}")
                options = {**self._exact.options, "weights": self._job.weights, "max_running": 1}
                self._narrow = self._stack.enter_context(LLM(base.engine.config.load.model, **options))
            base = self._narrow
        with base.beside(kv_format=kv_format) as llm:
            yield LLMTarget(llm, kv_format, self._exact.chat)

    def _distance(self, baseline: Baseline, other: LLMTarget, name: str, length: int) -> None:
        key = NoteKey.of(other.llm.engine)
        head = {"kind": TEXT, "format": name, "length": length, "note": asdict(key)}
        try:
            found = baseline.distance(other.llm)
        except EngineError as error:
            self._store.add({**head, "error": str(error)})
            self._job.say(f"{length:,} tokens in {name}: {error}")
            return
        plan = other.llm.plan(1).to_json()
        self._store.add(
            {
                **head,
                "error": None,
                "bytes_per_token": plan["bytes_per_token"] + plan["scale_bytes_per_token"],
                "first_decoded": baseline.text.first_decoded,
                "positions": baseline.text.kept.tolist(),
                "kl": [float(f"{x:.6g}") for x in found.kl],
                "same_top": found.same_top.astype(int).tolist(),
                "perplexity": _perplexity(found.logprobs),
                "exact_perplexity": _perplexity(baseline.logprobs),
                "layer_errors": [float(f"{x:.6g}") for x in found.layer_errors],
            }
        )
        self._job.say(
            f"{length:,} tokens in {name}: KL {found.kl.mean():.2g}, top-1 the same at {found.same_top.mean():.1%}"
        )

    def _control(self, baseline: Baseline, length: int) -> None:
        weights, free = self._exact.llm.engine.fixed.weight_bytes, machine.available_bytes()
        if free < SECOND_COPY * weights:
            self._job.say(f"no control: Hugging Face's copy of the model needs more than the {format_bytes(free)} free")
            return
        self._job.say(f"{length:,} tokens through Hugging Face in float32")
        reference = Reference(self._exact.llm)
        found = baseline.control(reference)
        worst = found.max_logprob_difference
        verdict = OK if worst <= TOLERANCE else LOSSY if reference.lossy else ENGINE_ERROR
        self._store.add(
            {
                "kind": CONTROL,
                "format": EXACT,
                "length": length,
                "verdict": verdict,
                "max_logprob_difference": worst,
                "kl": float(found.kl.max()),
                "top1": float(found.same_top.mean()),
            }
        )
        self._job.say(f"{length:,} tokens: {verdict}, logprobs differ by {worst:.1e}")

    def _answer(self, target: LLMTarget, name: str, length: int) -> None:
        needles, tasks = ask_needles(self._job, target, length), ask_tasks(self._job, target, length)
        record = {"kind": ANSWERS, "format": name, "length": length, "needles": needles, "tasks": tasks}
        self._store.add(record)
        said = [f"{what} {found['score']:.0%}" for what, found in (("needles", needles), ("task", tasks)) if found]
        self._job.say(f"{length:,} tokens in {name}: {', '.join(said) or 'no room for questions'}")

    def _write(self, target: LLMTarget, name: str) -> None:
        self._store.add(
            {"kind": GREEDY, "format": name, "texts": write_greedy(target, self._job.max_tokens or GREEDY_TOKENS)}
        )
        self._job.say(f"greedy texts in {name}: written")

    def _broken(self, name: str) -> bool:
        """Whether this format's logits were no numbers: it has no answers either."""
        return any(r.get("error") for r in self._store.records if r["kind"] == TEXT and r["format"] == name)

    def _find(self, kind: str, name: str, length: int | None = None) -> Mapping[str, Any] | None:
        wanted = (kind, name, length)
        return next((r for r in self._store.records if (r["kind"], r["format"], r.get("length")) == wanted), None)


def _perplexity(logprobs: np.ndarray) -> float:
    return float(np.exp(-logprobs.mean()))


def _note(report: Mapping[str, Any]) -> None:
    """Keep what was measured beside the model, where `plan` and a server's start find it."""
    for cell in report["cells"]:
        if cell["error"] is None:
            save_note(
                NoteKey(**cell["note"]), Measured(cell["length"], cell["kl"]["mean"], cell["top1"], report["date"][:10])
            )


SUITE = Suite(
    "drift",
    "what narrower formats of the cache and the weights change, beside the exact run of the same engine",
    tuple(TASKS),
    (TASK,),
    has_depths=False,
    run=run,
    table=table_text,
    compares_formats=True,
)
