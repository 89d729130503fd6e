"""The jobs folder: its lock, its database's schema, and plain words for what a disk may answer."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path
from typing import IO

from longctx.errors import LongctxError

SCHEMA_VERSION = 1
DATABASE, LOCK = "jobs.sqlite", "lock"

_SCHEMA = """
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    state TEXT NOT NULL,
    digest BLOB NOT NULL,
    created REAL NOT NULL,
    ttl_s REAL NOT NULL,
    idempotency_key TEXT,
    started REAL,
    finished REAL,
    attempts INTEGER NOT NULL,
    error TEXT,
    usage TEXT
);
CREATE UNIQUE INDEX one_job_per_key ON jobs (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX jobs_of_a_tenant ON jobs (tenant, seq);
CREATE TABLE bodies (seq INTEGER PRIMARY KEY REFERENCES jobs ON DELETE CASCADE, body BLOB NOT NULL);
CREATE TABLE results (seq INTEGER PRIMARY KEY REFERENCES jobs ON DELETE CASCADE, result BLOB NOT NULL);
CREATE TABLE chunks (
    seq INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE,
    n INTEGER NOT NULL,
    choice INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (seq, n)
) WITHOUT ROWID;
"""


def lock_folder(folder: Path) -> IO[bytes]:
    """Make the folder if it is missing, and lock it for this process; the lock lives as long as the file is open."""
    try:
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True)
        lock = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600), "wb")
    except OSError as error:
        why = error.strerror or str(error)
        raise LongctxError(f"the jobs folder {folder} cannot be used ({why}); name another with --jobs-dir") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise LongctxError(
            f"another server uses the jobs folder {folder}; stop it, or name another folder with --jobs-dir"
        ) from error
    return lock


def open_database(folder: Path) -> sqlite3.Connection:
    """A connection in WAL mode with this schema, whose every statement is its own transaction unless one is begun."""
    path = folder / DATABASE
    try:
        # SQLite gives its log and index the database's own mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise LongctxError(f"{path} cannot be opened ({error}); name another folder with --jobs-dir") from error
    try:
        _prepare(db, path)
    except sqlite3.Error as error:
        db.close()
        remedy = "free some space, or name another folder with --jobs-dir"
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            remedy = "move it away, or name another folder with --jobs-dir"
        raise LongctxError(f"{path} cannot be used ({in_words(error)}); {remedy}") from error
    except LongctxError:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Set the connection up and create or check the schema."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, SCHEMA_VERSION):
        raise LongctxError(
            f"{path} was written by another version of longctx (format {version}, this one has {SCHEMA_VERSION}); "
            "move it away, or name another folder with --jobs-dir"
        )
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA secure_delete = ON")
    db.execute(f"PRAGMA journal_size_limit = {2**20}")
    if version == 0:
        db.executescript(f"BEGIN IMMEDIATE;\n{_SCHEMA}\nPRAGMA user_version = {SCHEMA_VERSION};\nCOMMIT;")
    else:
        db.execute("BEGIN IMMEDIATE")  # finds out now, not at the first job, that nothing can be written
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")


def in_words(error: sqlite3.Error) -> str:
    """What the disk or the database says, without a path."""
    code = (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
    return {
        sqlite3.SQLITE_FULL: "the disk is full",
        sqlite3.SQLITE_READONLY: "the disk or folder is read-only",
        sqlite3.SQLITE_IOERR: "the disk reports an error",
        sqlite3.SQLITE_CORRUPT: "the file is damaged",
        sqlite3.SQLITE_NOTADB: "the file is no database",
    }.get(code, str(error))
