"""Jobs on disk: one SQLite file in a folder that one server owns; what it has accepted survives a kill."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longctx.server.job_files import in_words, lock_folder, open_database

WAITING, RUNNING, DONE, FAILED, CANCELLED = "queued", "running", "completed", "failed", "cancelled"
STATES = (WAITING, RUNNING, DONE, FAILED, CANCELLED)
OPEN_STATES = (WAITING, RUNNING)

VACUUM_PAGES = 8192
"""Free pages given back to the file system after one removal: bounded, since everything else waits meanwhile."""


class StoreError(Exception):
    """The disk did not take or give what was asked; nothing was changed. `message` names no path."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class JobLimitError(Exception):
    """There are as many jobs as there may be."""


@dataclass(frozen=True)
class Job:
    """One job without its large parts. Times are seconds of `time.time`; `tenant` is "" where there are no keys.

    `attempts` counts the runs that began, `digest` names what was asked, to tell two bodies under one idempotency key
    apart. `error` is {"status", "error"} of a failed job.
    """

    id: str
    tenant: str
    endpoint: str
    state: str
    digest: bytes
    created: float
    ttl_s: float
    idempotency_key: str | None = None
    started: float | None = None
    finished: float | None = None
    attempts: int = 0
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    seq: int = 0

    @property
    def is_open(self) -> bool:
        """Whether there is still something to be done for it."""
        return self.state in OPEN_STATES

    @property
    def expires(self) -> float | None:
        """When it is forgotten; only what has ended expires."""
        return None if self.finished is None else self.finished + self.ttl_s


@dataclass(frozen=True)
class Chunk:
    """One event of a job's stream as it is sent; `choice` is the choice it belongs to, or -1 for none."""

    choice: int
    data: bytes


_COLUMNS = tuple(Job.__dataclass_fields__)
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM jobs "


class JobStore:
    """Owns the folder and the database in it; every method is one transaction. Use it from one thread.

    A lock file keeps a second server out; the kernel releases it when a process is killed. What `add`, `start`,
    `finish` and `remove` did is on the disk when they return. Chunks need not be: a job that did not finish is run
    again, and they with it. What was removed is overwritten with zeros. The folder is made for its owner alone; in
    one that exists only the files are. Raises `LongctxError` for a folder that cannot be used and `StoreError` later.
    """

    def __init__(self, folder: Path):
        self.folder = folder.expanduser()
        self._lock = lock_folder(self.folder)
        try:
            self._db = open_database(self.folder)
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Give the folder free. Nothing is lost without it."""
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()
        self._lock.close()

    # -- reading -------------------------------------------------------------------------------------------------

    def get(self, id: str) -> Job | None:
        with self._read():
            return self._one("WHERE id = ?", id)

    def find(self, tenant: str, key: str) -> Job | None:
        """The tenant's job with this idempotency key."""
        with self._read():
            return self._one("WHERE tenant = ? AND idempotency_key = ?", tenant, key)

    def list(self, tenant: str, limit: int, after: str | None = None, state: str | None = None) -> Sequence[Job]:
        """The tenant's jobs, newest first, from the one after (older than) `after` on."""
        with self._read():
            where, args = "WHERE tenant = ? ", [tenant]
            if after is not None:
                where, args = (
                    where + "AND seq < (SELECT seq FROM jobs WHERE id = ? AND tenant = ?) ",
                    [*args, after, tenant],
                )
            if state is not None:
                where, args = where + "AND state = ? ", [*args, state]
            return self._some(where + "ORDER BY seq DESC LIMIT ?", *args, limit)

    def body(self, job: Job) -> bytes:
        """What the job asks for; kept until it has ended."""
        return self._blob("SELECT body FROM bodies WHERE seq = ?", job) or b""

    def result(self, job: Job) -> bytes | None:
        """What a completed job answers."""
        return self._blob("SELECT result FROM results WHERE seq = ?", job)

    def tail(self, id: str, attempt: int, skip: int, limit: int = 256) -> tuple[Job, Sequence[Chunk]] | None:
        """A job as it is now, and up to `limit` of its chunks after the first `skip`; after none if the run that the
        caller read them from, `attempt`, is not the present one. None if the job is gone."""
        with self._read():
            job = self._one("WHERE id = ?", id)
            if job is None:
                return None
            skip = skip if job.attempts == attempt else 0
            rows = self._db.execute(
                "SELECT choice, data FROM chunks WHERE seq = ? AND n >= ? ORDER BY n LIMIT ?", (job.seq, skip, limit)
            )
            return job, [Chunk(*row) for row in rows]

    def in_state(self, state: str) -> Sequence[Job]:
        """Every tenant's jobs in this state, oldest first. Those found running at the start were broken off."""
        with self._read():
            return self._some("WHERE state = ? ORDER BY seq", state)

    def counts(self) -> dict[str, int]:
        """How many jobs of all tenants are in each state."""
        with self._read():
            found = dict(self._db.execute("SELECT state, count(*) FROM jobs GROUP BY state"))
        return {state: found.get(state, 0) for state in STATES}

    # -- writing -------------------------------------------------------------------------------------------------

    def add(self, job: Job, body: bytes, *, max_jobs: int, max_of_tenant: int) -> Job:
        """Keep a new job, or return the one that its tenant already has under the same idempotency key.

        Raises `JobLimitError` where the new one would be one too many.
        """
        with self._write():
            if job.idempotency_key is not None:
                known = self._one("WHERE tenant = ? AND idempotency_key = ?", job.tenant, job.idempotency_key)
                if known is not None:
                    return known
            total, own = self._db.execute("SELECT count(*), total(tenant = ?) FROM jobs", (job.tenant,)).fetchone()
            if total >= max_jobs or own >= max_of_tenant:
                raise JobLimitError
            row = {name: _to_sql(getattr(job, name)) for name in _COLUMNS if name != "seq"}
            marks = ", ".join("?" * len(row))
            cursor = self._db.execute(f"INSERT INTO jobs ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))
            assert cursor.lastrowid is not None
            self._db.execute("INSERT INTO bodies VALUES (?, ?)", (cursor.lastrowid, body))
            return replace(job, seq=cursor.lastrowid)

    def start(self, id: str, now: float) -> Job | None:
        """A waiting job runs from now on; None if it does not wait any more."""
        with self._write():
            changed = self._db.execute(
                "UPDATE jobs SET state = ?, started = ?, attempts = attempts + 1 WHERE id = ? AND state = ?",
                (RUNNING, now, id, WAITING),
            )
            return self._one("WHERE id = ?", id) if changed.rowcount else None

    def append(self, job: Job, first: int, chunks: Sequence[Chunk]) -> None:
        """Keep the chunks from number `first` on of a running job's present run; nothing if it has ended meanwhile."""
        rows = [(job.seq, first + i, chunk.choice, chunk.data) for i, chunk in enumerate(chunks)]
        with self._write(durable=False):
            if self._one("WHERE seq = ? AND state = ? AND attempts = ?", job.seq, RUNNING, job.attempts) is not None:
                self._db.executemany("INSERT INTO chunks VALUES (?, ?, ?, ?)", rows)

    def finish(
        self,
        id: str,
        state: str,
        now: float,
        *,
        result: bytes | None = None,
        usage: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> Job | None:
        """End a job, with all that there is to keep of it, and forget what it asked; None if it has ended before."""
        assert state not in OPEN_STATES
        with self._write():
            job = self._one(f"WHERE id = ? AND state IN {OPEN_STATES}", id)
            if job is None:
                return None
            self._db.execute(
                "UPDATE jobs SET state = ?, finished = ?, error = ?, usage = ? WHERE seq = ?",
                (state, now, _to_sql(error), _to_sql(usage), job.seq),
            )
            self._db.execute("DELETE FROM bodies WHERE seq = ?", (job.seq,))
            if result is not None:
                self._db.execute("INSERT INTO results VALUES (?, ?)", (job.seq, result))
            job = self._one("WHERE seq = ?", job.seq)
        self._shrink()
        return job

    def requeue(self, id: str, *, forgive: bool = False) -> Job | None:
        """A running job waits again and starts from its beginning. `forgive` does not count the run that broke off."""
        with self._write():
            job = self._one("WHERE id = ? AND state = ?", id, RUNNING)
            if job is None:
                return None
            self._db.execute("DELETE FROM chunks WHERE seq = ?", (job.seq,))
            self._db.execute(
                "UPDATE jobs SET state = ?, started = NULL, attempts = attempts - ? WHERE seq = ?",
                (WAITING, int(forgive), job.seq),
            )
            return self._one("WHERE seq = ?", job.seq)

    def remove(self, id: str) -> None:
        """Forget a job that has ended."""
        with self._write():
            self._db.execute(f"DELETE FROM jobs WHERE id = ? AND state NOT IN {OPEN_STATES}", (id,))
        self._shrink()

    def expire(self, now: float) -> int:
        """Forget the jobs whose time is over; how many they were."""
        with self._write():
            gone = self._db.execute(
                f"DELETE FROM jobs WHERE finished + ttl_s <= ? AND state NOT IN {OPEN_STATES}", (now,)
            )
        if gone.rowcount:
            self._shrink()
        return gone.rowcount

    # -- inside --------------------------------------------------------------------------------------------------

    def _shrink(self) -> None:
        """Give free pages back, and empty the log, which still has what was in them; it may fail without harm."""
        with contextlib.suppress(sqlite3.Error):
            # A script runs it to its end: it gives one page back for every row it does not return.
            self._db.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES}); PRAGMA wal_checkpoint(TRUNCATE);")

    def _one(self, where: str, *args: Any) -> Job | None:
        row = self._db.execute(_SELECT + where, args).fetchone()
        return None if row is None else _from_sql(row)

    def _some(self, where: str, *args: Any) -> Sequence[Job]:
        return [_from_sql(row) for row in self._db.execute(_SELECT + where, args)]

    def _blob(self, query: str, job: Job) -> bytes | None:
        with self._read():
            row = self._db.execute(query, (job.seq,)).fetchone()
            return None if row is None else row[0]

    @contextlib.contextmanager
    def _read(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"the jobs cannot be read: {in_words(error)}") from error

    @contextlib.contextmanager
    def _write(self, durable: bool = True) -> Iterator[None]:
        try:
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                # A full disk may have rolled back by itself.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreError(f"the jobs cannot be written: {in_words(error)}") from error


def _to_sql(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value


def _from_sql(row: Sequence[Any]) -> Job:
    fields = dict(zip(_COLUMNS, row, strict=True))
    for name in ("error", "usage"):
        fields[name] = None if fields[name] is None else json.loads(fields[name])
    return Job(**fields)
