"""The engine's own process: it builds an engine, answers messages at once, and sends every event."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from longctx.build import build_engine
from longctx.config import EngineConfig
from longctx.drift_note import NoteKey, drift_line
from longctx.engine import Engine
from longctx.errors import EngineError, LongctxError, RequestError
from longctx.events import Event
from longctx.kv.groups import formats_text
from longctx.loop import EngineLoop
from longctx.server.logs import configure_child
from longctx.server.messages import (
    Accepted,
    Answer,
    Broken,
    Cancel,
    EngineStats,
    Happened,
    Loading,
    ModelInfo,
    Query,
    Ready,
    Refused,
    Stop,
    Submit,
    ToEngine,
)
from longctx.server.outbox import Outbox

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.5
LOADING_INTERVAL_S = 0.1
FLUSH_S = 5.0
SWITCH_INTERVAL_S = 1e-3


def main(fd: int) -> None:
    """Serve the connection `fd`; its first message is the `EngineConfig`. Never returns."""
    # The parent decides when to stop, and says so in a message: a Ctrl-C or a SIGTERM to the whole group is its to
    # handle. It blocked both before this process existed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    faulthandler.enable()
    # The stepping thread lets go of the interpreter in every operator: whoever takes it then must soon give it back.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configure_child()
    connection = Connection(fd)
    try:
        [config] = connection.recv()
    except EOFError:
        _leave(1)
    _leave(EngineServer(connection, Outbox(connection)).run(config))


def _leave(code: int) -> None:
    """End at once: nothing here needs the interpreter's own end, and a library that hangs in it would stay behind."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class EngineServer:
    """Three threads beside the engine's own: one reads messages and answers while a step runs, one writes, one counts.

    A request goes from the pipe to the engine's inbox and its events from the engine's thread to the outbox; nothing
    here makes the stepping thread wait.
    """

    def __init__(self, connection: Connection, outbox: Outbox):
        self._connection = connection
        self._outbox = outbox
        self._loop: EngineLoop | None = None
        self._busy = threading.Event()

    def run(self, config: EngineConfig) -> int:
        """Load, serve until told to stop; the exit code."""
        threading.Thread(target=self._read, name="longctx-reader", daemon=True).start()
        try:
            engine = build_engine(config, LoadingReports(self._outbox))
        except LongctxError as error:
            return self._break(str(error), user_error=True)
        except Exception as error:
            log.exception("the engine could not be built")
            return self._break(f"the engine could not be built: {type(error).__name__}: {error}")
        # What was loaded stays: no later collection need look at it again.
        gc.collect()
        gc.freeze()
        self._engine = engine
        self._loop = loop = EngineLoop(engine)
        self._outbox.post(Ready(model_info(engine)))
        threading.Thread(target=self._count, args=(engine, loop), name="longctx-stats", daemon=True).start()
        loop.wait()
        if loop.failure is not None:
            return self._break(str(loop.failure))
        loop.close()
        self._outbox.close(FLUSH_S)
        return 0

    def _break(self, message: str, user_error: bool = False) -> int:
        self._outbox.post(Broken(message, user_error))
        self._outbox.close(FLUSH_S)
        return 1

    # -- messages ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                for message in self._connection.recv():
                    self._handle(message)
        except (EOFError, OSError):
            # The other side is gone, however it went: nobody wants what is computed here.
            _leave(1)
        except BaseException:
            log.exception("the engine's process cannot go on reading messages")
            _leave(1)

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Stop):
            if self._loop is None:
                _leave(0)
            else:
                self._loop.stop()
        elif self._loop is None:
            raise AssertionError(f"{type(message).__name__} before the engine was ready")
        elif isinstance(message, Submit):
            self._submit(message, self._engine, self._loop)
        elif isinstance(message, Cancel):
            self._loop.cancel(message.request_id)
        else:
            self._outbox.post(answer(message, self._engine))

    def _submit(self, submit: Submit, engine: Engine, loop: EngineLoop) -> None:
        name = submit.request_id
        try:
            request = engine.make_request(
                submit.token_ids, submit.params, cache_salt=submit.cache_salt, request_id=name
            )
            accepted = Accepted(name, request.seed)
            loop.submit(request, self._deliver, on_queued=lambda: self._outbox.post(accepted), bounded=not submit.again)
        except LongctxError as error:
            self._outbox.post(Refused(name, error.code, str(error)))
        except EngineError:
            # The engine has just broken: what was never accepted goes to the next one.
            pass
        except Exception as error:
            log.exception("a request could not be made")
            self._outbox.post(Refused(name, "engine_error", f"the engine failed: {type(error).__name__}: {error}"))
        self._busy.set()

    def _deliver(self, event: Event | Exception) -> None:
        # An exception is the end of the whole engine, which `run` reports once.
        if not isinstance(event, Exception):
            self._outbox.post(Happened(event))

    # -- counting ------------------------------------------------------------------------------------------------

    def _count(self, engine: Engine, loop: EngineLoop) -> None:
        while True:
            self._outbox.post(engine_stats(engine, loop.num_open))
            self._busy.wait()
            self._busy.clear()
            while loop.num_open:
                self._outbox.post(engine_stats(engine, loop.num_open))
                time.sleep(STATS_INTERVAL_S)


class LoadingReports:
    """Sends how far the model is, every stage once and then some ten times a second."""

    def __init__(self, outbox: Outbox):
        self._outbox = outbox
        self._stage = ""
        self._next_s = 0.0

    def __call__(self, stage: str, done: float, total: float) -> None:
        now_s = time.monotonic()
        if stage != self._stage or now_s >= self._next_s or done >= total:
            self._stage, self._next_s = stage, now_s + LOADING_INTERVAL_S
            self._outbox.post(Loading(stage, done, total))


def answer(query: Query, engine: Engine) -> Answer:
    """The answer to a question that is no request."""
    try:
        if query.kind != "plan":
            raise RequestError(f"unknown query {query.kind!r}")
        return Answer(query.query_id, engine.plan(**query.args).to_json())
    except LongctxError as error:
        return Answer(query.query_id, code=error.code, error=str(error))
    except Exception as error:
        log.exception("a query failed")
        return Answer(query.query_id, code="engine_error", error=f"{type(error).__name__}: {error}")


def model_info(engine: Engine) -> ModelInfo:
    """What the HTTP side must know of the loaded model."""
    loaded, partition = engine.loaded, engine.partition
    longest = partition.longest_request
    return ModelInfo(
        model=loaded.spec.name,
        folder=str(loaded.folder),
        vocab_size=loaded.spec.vocab_size,
        max_positions=loaded.spec.max_positions,
        longest_request=longest,
        dtype=loaded.spec.dtype,
        kv_format=formats_text(engine.groups),
        weight_bytes=engine.fixed.weight_bytes,
        workspace_bytes=engine.fixed.workspace_bytes,
        pool_bytes=partition.pool_bytes,
        block_tokens=partition.shape.block_tokens,
        eos_token_ids=tuple(sorted(loaded.eos_token_ids)),
        plan=engine.plan(longest).to_json(),
        weights=loaded.spec.weights,
        attention=str(engine.config.variant),
        drift=drift_line(NoteKey.of(engine)),
    )


def engine_stats(engine: Engine, num_open: int) -> EngineStats:
    """A snapshot of queue, cache and counters; the engine's thread may be in the middle of a step.

    Of `num_open` requests those that do not run wait, also where the scheduler has not seen them yet.
    """
    scheduler, running = engine.scheduler, len(engine.scheduler.running)
    sizes = [group.layout.block_bytes for group in engine.groups]
    stats = engine.cache_stats()
    return EngineStats(
        running=running,
        waiting=max(0, num_open - running),
        kv={
            "g1": {
                "held": sum(size * s.held for size, s in zip(sizes, stats, strict=True)),
                "cached": sum(size * s.cached for size, s in zip(sizes, stats, strict=True)),
                "cap": sum(size * s.total for size, s in zip(sizes, stats, strict=True)),
            }
        },
        counters=scheduler.counters.as_dict(),
        engine=os.getpid(),
    )
