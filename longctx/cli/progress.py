"""Progress on stderr: a bar on a terminal, a plain line every few seconds anywhere else."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from longctx.events import ProgressEvent
from longctx.units import format_bytes, format_seconds

LINE_INTERVAL_S = 5.0


def stderr_console() -> Console:
    """The console for everything that is not a result; a result goes to stdout and nothing else does."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(console: Console, text: str) -> None:
    """One line as it is: a `[` in a file name is no markup."""
    console.print(text, markup=False)


class Meter:
    """Shows how far something is. Owns its place on the console until it is closed; use as a context manager.

    `show` may be called as often as one likes; a change of `label` starts a new bar or line.
    """

    def __init__(self, console: Console, interval_s: float = LINE_INTERVAL_S):
        self._console = console
        self._interval_s = interval_s
        self._label: str | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line_s = 0.0
        self._last_text = ""

    def show(self, label: str, done: float, total: float, note: str = "") -> None:
        """`done` of `total` of what `label` names; `note` follows the percentage."""
        if label != self._label:
            self.close()
            self._label = label
        if self._console.is_terminal:
            self._show_bar(label, done, total, note)
        else:
            self._show_line(label, done, total, note)

    def close(self) -> None:
        """Leave the last state on the console and the cursor below it."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = self._label = None
        self._last_line_s, self._last_text = 0.0, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show_bar(self, label: str, done: float, total: float, note: str) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=self._console,
                redirect_stdout=False,
                expand=False,
            )
            self._task = self._bar.add_task(label, total=total, note=note)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total, note=note)

    def _show_line(self, label: str, done: float, total: float, note: str) -> None:
        now_s = time.monotonic()
        finished = done >= total
        if not finished and self._last_text and now_s - self._last_line_s < self._interval_s:
            return
        percent = 100.0 * done / total if total > 0 else 100.0
        text = f"{label}: {percent:.0f} %{'  ' + note if note else ''}"
        # The end is reported more than once, at the same percentage; say it once.
        if finished and self._last_text.startswith(f"{label}: 100 %"):
            return
        say(self._console, text)
        self._last_line_s, self._last_text = now_s, text


class JobProgress:
    """One request's progress, from its queue place to its last token."""

    def __init__(self, meter: Meter):
        self._meter = meter
        self._first: ProgressEvent | None = None

    def prefill(self, event: ProgressEvent) -> None:
        """Show a progress event: percent, tokens per second, what is left, what was cached."""
        if event.stage == "queued":
            place = "" if event.queue_position is None else f"place {event.queue_position} in the queue"
            self._meter.show("waiting", 0, event.total, place)
            return
        if self._first is None:
            self._first = event
        self._meter.show("reading", event.processed, event.total, self._note(self._first, event))

    def decode(self, done: int, limit: int, elapsed_s: float) -> None:
        """Show `done` of at most `limit` generated tokens, `elapsed_s` after the first of them."""
        rate = f", {(done - 1) / elapsed_s:,.1f} tokens/s" if done > 1 and elapsed_s > 0 else ""
        self._meter.show("answering", done, limit, f"{done:,} of at most {limit:,} tokens{rate}")

    @staticmethod
    def _note(first: ProgressEvent, event: ProgressEvent) -> str:
        parts = [f"{event.processed:,} of {event.total:,} tokens"]
        if event.cached:
            parts.append(f"{event.cached:,} cached")
        # The first event of a step already holds its first layer, so speed is measured from there on.
        elapsed_s = (event.time_ms - first.time_ms) / 1e3
        if elapsed_s > 0 and event.processed > first.processed:
            parts.append(f"{(event.processed - first.processed) / elapsed_s:,.0f} tokens/s")
        if event.eta_ms:
            parts.append(f"{format_seconds(event.eta_ms / 1e3)} left")
        return ", ".join(parts)


class LoadProgress:
    """The callback that loading, pulling and converting report to: stage, bytes done, bytes in all."""

    def __init__(self, meter: Meter):
        self._meter = meter

    def __call__(self, stage: str, done: float, total: float) -> None:
        # A stage without a size counts from 0 to 1.
        self._meter.show(stage, done, total, "" if total <= 1 else f"{format_bytes(done)} of {format_bytes(total)}")
