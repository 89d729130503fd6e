"""Runs a batch in this process: many requests at once in the engine, each answered as the server would."""

from __future__ import annotations

import logging
import queue
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from longctx.engine import Engine
from longctx.errors import EngineError, LongctxError
from longctx.events import Event, FinishEvent, ProgressEvent, TokenEvent
from longctx.loop import EngineLoop
from longctx.request import Request
from longctx.server.batch_file import Line, RequestFile, ResultFile
from longctx.server.engine_process import model_info
from longctx.server.errors import ApiError
from longctx.server.prepare import prepare
from longctx.server.reply import RENDERERS
from longctx.server.reply_parts import Renderer, check_end, usage_json
from longctx.server.settings import ServerSettings
from longctx.server.text_side import TextSide
from longctx.server.work import Prepared, ReplyOptions

log = logging.getLogger(__name__)

AHEAD = 2
"""So many times the requests that can run are handed to the engine: the next are tokenized while others run."""


@dataclass
class Counts:
    """How far a batch is. `skipped` results were there before; `failed` counts every result that is no answer.

    The tokens up to `completion_tokens` are of what was answered; `read` are prompt tokens computed or found in the
    cache, `generated` those of answers, both also of requests that still run.
    """

    total: int
    skipped: int = 0
    answered: int = 0
    failed: int = 0
    running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    read: int = 0
    generated: int = 0

    @property
    def written(self) -> int:
        return self.answered + self.failed


@dataclass(eq=False)
class _Running:
    """One line in the engine: a request per choice."""

    line: Line
    renderer: Renderer
    requests: list[Request]
    processed: list[int]
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.requests)


class Batch:
    """The requests of a file, minus those that have a result.

    Used from one thread; `cancel` may be called from a signal handler. `on_progress` hears of every event.
    """

    def __init__(
        self,
        engine: Engine,
        loop: EngineLoop,
        model: str,
        requests: RequestFile,
        results: ResultFile,
        on_progress: Callable[[Counts], None] | None = None,
    ):
        self._engine = engine
        self._loop = loop
        self._info = model_info(engine)
        self._settings = ServerSettings(served_name=model)
        self._text = TextSide(engine.loaded.tokenizer, self._info.longest_request)
        self._requests = requests
        self._results = results
        self._on_progress = on_progress
        self._events: queue.SimpleQueue[tuple[_Running, int, Event | Exception]] = queue.SimpleQueue()
        self._running: set[_Running] = set()
        self._cancelled = False
        self._most = AHEAD * engine.config.scheduler.max_running
        todo = [line for line in requests.lines if line.id not in results.done]
        self._todo: Iterator[Line] = iter(todo)
        self.counts = Counts(len(todo), skipped=len(requests.lines) - len(todo))

    def run(self) -> Counts:
        """Answer every request; what was cancelled has no result and runs the next time.

        Raises `EngineError` if the engine breaks, and `LongctxError` if a file cannot be read or written.
        """
        try:
            self._fill()
            while self._running:
                self._take(*self._events.get())
                self._fill()
                if self._on_progress is not None:
                    self._on_progress(self.counts)
        finally:
            self._cancel_running()
        return self.counts

    def cancel(self) -> None:
        """Begin no more requests and end those that run, between two layers."""
        self._cancelled = True
        self._cancel_running()

    def _cancel_running(self) -> None:
        for running in list(self._running):
            for request in running.requests:
                request.cancelled = True

    # -- into the engine -----------------------------------------------------------------------------------------

    def _fill(self) -> None:
        while not self._cancelled and sum(running.left for running in self._running) < self._most:
            line = next(self._todo, None)
            if line is None:
                return
            self._begin(line)

    def _begin(self, line: Line) -> None:
        if line.error is not None:
            self._write(line, None, {"code": "invalid_request", "message": line.error})
            return
        endpoint, body = self._requests.body(line)
        try:
            prepared = prepare(endpoint, body, self._text, self._settings, self._info)
            requests = [
                self._engine.make_request(
                    work.token_ids, work.params, cache_salt=prepared.options.cache_salt, request_id=uuid.uuid4().hex
                )
                for work in prepared.works
            ]
        except ApiError as error:
            self._refuse(line, error)
        except LongctxError as error:
            self._refuse(line, ApiError.from_code(error.code, str(error)))
        except Exception:
            # A line that trips over a mistake of ours must not stop the ten thousand after it.
            log.exception("line %d could not be prepared", line.number)
            self._refuse(
                line, ApiError(500, "the request could not be prepared; the log says why", type="server_error")
            )
        else:
            self._start(line, prepared, requests)

    def _start(self, line: Line, prepared: Prepared, requests: list[Request]) -> None:
        prepared = replace(prepared, options=_options_here(prepared.options))
        renderer = RENDERERS[prepared.endpoint](
            prepared, uuid.uuid4().hex, int(time.time()), [request.seed for request in requests], self._text.tokenizer
        )
        running = _Running(line, renderer, requests, [0] * len(requests))
        self._running.add(running)
        self.counts.running += 1
        for choice, request in enumerate(requests):
            self._loop.submit(request, partial(self._hear, running, choice), bounded=False)
        if self._cancelled:  # which may have happened before anybody knew of these
            self._cancel_running()

    def _hear(self, running: _Running, choice: int, event: Event | Exception) -> None:
        self._events.put((running, choice, event))

    # -- out of it -----------------------------------------------------------------------------------------------

    def _take(self, running: _Running, choice: int, event: Event | Exception) -> None:
        if isinstance(event, Exception):
            raise event if isinstance(event, EngineError) else EngineError(f"the engine has stopped: {event}")
        if isinstance(event, ProgressEvent):
            self.counts.read += event.processed - running.processed[choice]
            running.processed[choice] = event.processed
        elif isinstance(event, TokenEvent):
            running.renderer.answers[choice].take(event)
            self.counts.generated += 1
        elif isinstance(event, FinishEvent):
            running.renderer.answers[choice].close(event)
            running.left -= 1
            if not running.left:
                self._finish(running)

    def _finish(self, running: _Running) -> None:
        self._running.remove(running)
        self.counts.running -= 1
        ends = running.renderer.ends
        if any(end.reason == "cancelled" for end in ends):
            return
        try:
            for end in ends:
                check_end(end)
        except ApiError as error:
            self._refuse(running.line, error)
            return
        self._write(running.line, _response(200, running.renderer.whole()), None)
        usage = usage_json(ends, running.renderer.options.n)
        self.counts.answered += 1
        self.counts.prompt_tokens += usage["prompt_tokens"]
        self.counts.completion_tokens += usage["completion_tokens"]
        self.counts.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]

    def _refuse(self, line: Line, error: ApiError) -> None:
        self._write(line, _response(error.status, error.body()), None)

    def _write(self, line: Line, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> None:
        self._results.append({"id": line.id, "custom_id": line.custom_id, "response": response, "error": error})
        self.counts.failed += response is None or response["status_code"] != 200


def _response(status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}


def _options_here(options: ReplyOptions) -> ReplyOptions:
    """How the reply is to look where nobody reads it while it is made."""
    idle = {"stream": options.stream, "timeout_s": options.timeout_s is not None}
    warnings = tuple(f"{name} has no effect in a batch" for name, is_set in idle.items() if is_set)
    return replace(options, stream=False, warnings=options.warnings + warnings)
