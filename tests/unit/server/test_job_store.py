"""The store of jobs: what it keeps through kills, full disks, rivals and other versions."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longctx.errors import LongctxError
from longctx.server.job_files import DATABASE
from longctx.server.job_store import (
    CANCELLED,
    DONE,
    FAILED,
    RUNNING,
    WAITING,
    Chunk,
    Job,
    JobLimitError,
    JobStore,
    StoreError,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    store = JobStore(tmp_path / "jobs")
    yield store
    store.close()


def new_job(id: str, tenant: str = "", created: float = 100.0, **fields: Any) -> Job:
    return Job(id, tenant, "chat", WAITING, b"digest", created, ttl_s=60.0, **fields)


def add(store: JobStore, id: str, tenant: str = "", body: bytes = b"{}", **fields: Any) -> Job:
    return store.add(new_job(id, tenant, **fields), body, max_jobs=100, max_of_tenant=100)


def chunks_of(store: JobStore, id: str, attempt: int = 1, skip: int = 0, limit: int = 256) -> list[Chunk]:
    tail = store.tail(id, attempt, skip, limit)
    assert tail is not None
    return list(tail[1])


def test_a_job_goes_from_waiting_to_its_result(store: JobStore) -> None:
    job = add(store, "a", body=b'{"prompt": "x"}')
    assert (store.get("a"), store.body(job)) == (job, b'{"prompt": "x"}')
    running = store.start("a", 101.0)
    assert running is not None
    assert (running.state, running.started, running.attempts) == (RUNNING, 101.0, 1)
    assert store.start("a", 102.0) is None, "it runs already"
    store.append(running, 0, [Chunk(0, b"1"), Chunk(1, b"2")])
    store.append(running, 2, [Chunk(-1, b"3")])
    done = store.finish("a", DONE, 110.0, result=b"answer", usage={"prompt_tokens": 3})
    assert done is not None and not done.is_open
    assert (done.state, done.finished, done.expires, done.usage) == (DONE, 110.0, 170.0, {"prompt_tokens": 3})
    assert (store.result(done), store.body(done)) == (b"answer", b""), "what was asked is forgotten"
    assert chunks_of(store, "a") == [Chunk(0, b"1"), Chunk(1, b"2"), Chunk(-1, b"3")]
    assert chunks_of(store, "a", skip=1, limit=1) == [Chunk(1, b"2")]
    assert store.finish("a", FAILED, 111.0) is None, "the first end counts"
    assert store.get("a") == done


def test_all_of_it_is_there_after_opening_again(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    add(store, "a", body=b"body", idempotency_key="k")
    store.start("a", 101.0)
    store.finish("a", FAILED, 110.0, error={"status": 400, "error": {"message": "no"}})
    known = store.get("a")
    store.close()
    again = JobStore(tmp_path)
    assert known is not None and known.error == {"status": 400, "error": {"message": "no"}}
    assert (again.get("a"), again.find("", "k")) == (known, known)
    again.close()


def test_a_run_that_broke_off_starts_from_its_beginning(store: JobStore) -> None:
    add(store, "a", body=b"body")
    job = store.start("a", 101.0)
    assert job is not None
    store.append(job, 0, [Chunk(0, b"old")])
    assert [j.id for j in store.in_state(RUNNING)] == ["a"]
    waiting = store.requeue("a")
    assert waiting is not None
    assert (waiting.state, waiting.started, waiting.attempts, store.body(waiting)) == (WAITING, None, 1, b"body")
    assert chunks_of(store, "a") == []
    again = store.start("a", 103.0)
    assert again is not None and again.attempts == 2
    store.append(again, 0, [Chunk(0, b"new")])
    assert chunks_of(store, "a", attempt=1, skip=1) == [Chunk(0, b"new")], (
        "a reader of the old run reads all of the new"
    )
    forgiven = store.requeue("a", forgive=True)
    assert forgiven is not None and forgiven.attempts == 1


def test_the_list_is_one_tenants_newest_first_in_pages(store: JobStore) -> None:
    for i in range(5):
        add(store, f"a{i}", "alice")
        add(store, f"b{i}", "bob")
    store.finish("a3", CANCELLED, 101.0)
    assert [j.id for j in store.list("alice", 3)] == ["a4", "a3", "a2"]
    assert [j.id for j in store.list("alice", 3, after="a2")] == ["a1", "a0"]
    assert [j.id for j in store.list("alice", 9, state=WAITING)] == ["a4", "a2", "a1", "a0"]
    assert list(store.list("alice", 9, after="b3")) == [], "another tenant's job is no place in this list"
    assert list(store.list("carol", 9)) == []


def test_all_tenants_jobs_are_counted_by_state(store: JobStore) -> None:
    for i, tenant in enumerate(("alice", "bob", "bob")):
        add(store, f"j{i}", tenant)
    store.finish("j1", CANCELLED, 101.0)
    assert store.counts() == {"queued": 2, "running": 0, "completed": 0, "failed": 0, "cancelled": 1}


def test_a_key_belongs_to_one_job_of_its_tenant(store: JobStore) -> None:
    first = add(store, "a", "alice", idempotency_key="k")
    assert add(store, "b", "alice", idempotency_key="k") == first
    assert store.get("b") is None
    other = add(store, "c", "bob", idempotency_key="k")
    assert other.id == "c"
    store.finish("a", CANCELLED, 101.0)
    store.remove("a")
    assert add(store, "d", "alice", idempotency_key="k").id == "d", "a forgotten job's key is free again"


def test_the_number_of_jobs_is_bounded_in_all_and_per_tenant(store: JobStore) -> None:
    bounds = {"max_jobs": 3, "max_of_tenant": 2}
    store.add(new_job("a0", "alice", idempotency_key="k"), b"", **bounds)
    store.add(new_job("a1", "alice"), b"", **bounds)
    with pytest.raises(JobLimitError):
        store.add(new_job("a2", "alice"), b"", **bounds)
    assert store.add(new_job("a3", "alice", idempotency_key="k"), b"", **bounds).id == "a0", "nothing new"
    store.add(new_job("b0", "bob"), b"", **bounds)
    with pytest.raises(JobLimitError):
        store.add(new_job("b1", "bob"), b"", **bounds)
    store.finish("a1", DONE, 101.0, result=b"")
    store.remove("a1")
    store.add(new_job("b1", "bob"), b"", **bounds)


def test_only_what_has_ended_expires(store: JobStore) -> None:
    for id in ("waits", "runs", "early", "late"):
        add(store, id)
    store.start("runs", 1.0)
    store.finish("early", DONE, 100.0, result=b"")
    store.finish("late", DONE, 101.0, result=b"")
    assert store.expire(159.9) == 0
    assert store.expire(160.0) == 1
    assert store.get("early") is None
    assert store.expire(1e9) == 1
    assert [j.id for j in store.list("", 9)] == ["runs", "waits"]
    store.remove("runs")
    assert store.get("runs") is not None, "what runs is cancelled first"


def test_what_was_removed_leaves_no_byte_and_no_rows(store: JobStore) -> None:
    secret, noise = b"the door opens at 4711", b"x" * 100_000
    add(store, "a", body=secret + noise)
    job = store.start("a", 1.0)
    assert job is not None
    store.append(job, 0, [Chunk(0, secret)])
    store.finish("a", DONE, 2.0, result=secret + noise)
    before = sum(f.stat().st_size for f in store.folder.iterdir())
    store.remove("a")
    rest = b"".join(f.read_bytes() for f in store.folder.iterdir())
    assert secret not in rest
    assert len(rest) < before / 2, "the space is given back"


def test_a_prompt_is_gone_when_its_job_has_ended(store: JobStore) -> None:
    secret = b"the door opens at 4711"
    add(store, "a", body=secret)
    store.start("a", 1.0)
    assert secret in b"".join(f.read_bytes() for f in store.folder.iterdir())
    store.finish("a", DONE, 2.0, result=b"{}")
    assert secret not in b"".join(f.read_bytes() for f in store.folder.iterdir())


def test_the_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = JobStore(tmp_path / "deep" / "jobs")
        add(store, "a")
        modes = {f.name: stat.S_IMODE(f.stat().st_mode) for f in store.folder.iterdir()}
        folder = stat.S_IMODE(store.folder.stat().st_mode)
        store.close()
        shared = tmp_path / "shared"
        shared.mkdir(mode=0o755)
        JobStore(shared).close()
        kept = stat.S_IMODE(shared.stat().st_mode)
    finally:
        os.umask(old)
    assert {f"{DATABASE}-wal", DATABASE} <= set(modes)
    assert set(modes.values()) == {0o600}
    assert (folder, kept) == (0o700, 0o755), "a folder that was there keeps its mode"


def test_a_second_server_is_refused_in_one_line(store: JobStore) -> None:
    with pytest.raises(LongctxError, match=r"another server uses the jobs folder .*--jobs-dir") as caught:
        JobStore(store.folder)
    assert "\n" not in str(caught.value)
    add(store, "a")


def test_the_folder_is_free_again_after_the_end(tmp_path: Path) -> None:
    for _ in range(2):
        JobStore(tmp_path).close()


def test_a_killed_server_leaves_whole_jobs_and_no_lock(tmp_path: Path) -> None:
    """A child adds job after job and is killed in the middle of it: what it reported is there, with its body."""
    code = f"""
        from pathlib import Path
        from longctx.server.job_store import WAITING, Job, JobStore
        store = JobStore(Path({str(tmp_path)!r}))
        for i in range(100_000):
            job = Job(f"j{{i}}", "", "chat", WAITING, b"", 0.0, 60.0)
            store.add(job, str(i).encode() * 5000, max_jobs=10**9, max_of_tenant=10**9)
            if i % 2:
                store.start(job.id, 1.0)
            print(i, flush=True)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    reported = [int(child.stdout.readline()) for _ in range(20)]
    child.send_signal(signal.SIGKILL)
    reported += [int(line) for line in child.stdout.read().splitlines() if line]
    child.wait()
    store = JobStore(tmp_path)
    for i in reported:
        job = store.get(f"j{i}")
        assert job is not None and store.body(job) == str(i).encode() * 5000
        assert job.state == (RUNNING if i % 2 else WAITING)
    assert not store._db.execute("PRAGMA integrity_check").fetchall()[1:]
    store.close()


def test_a_full_disk_refuses_the_job_and_nothing_else(store: JobStore) -> None:
    add(store, "a")
    running = store.start("a", 1.0)
    assert running is not None
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(StoreError, match=r"^the jobs cannot be written: the disk is full$"):
        add(store, "b", body=b"x" * 100_000)
    with pytest.raises(StoreError, match=r"disk is full"):
        store.finish("a", DONE, 2.0, result=b"x" * 100_000)
    assert store.get("b") is None
    assert store.get("a") == running, "an end that could not be kept has not happened"
    store._db.execute(f"PRAGMA max_page_count = {pages + 1000}")
    assert store.finish("a", DONE, 2.0, result=b"x" * 100_000) is not None
    add(store, "b", body=b"x" * 100_000)


def test_half_a_job_is_never_kept(store: JobStore) -> None:
    with pytest.raises(StoreError):
        add(store, "a", body=object())  # type: ignore[arg-type]
    assert store.get("a") is None


def test_a_disk_that_became_read_only_is_said_plainly(store: JobStore) -> None:
    add(store, "a")
    store._db.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreError, match=r"^the jobs cannot be written: the disk or folder is read-only$"):
        add(store, "b")
    assert store.get("a") is not None


@pytest.mark.parametrize("where", ["a file", "no place"])
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, where: str) -> None:
    path = tmp_path / "file"
    path.write_text("")
    folder = path if where == "a file" else Path("/proc/longctx-jobs")
    with pytest.raises(LongctxError, match=f"^the jobs folder {folder} cannot be used .*--jobs-dir$"):
        JobStore(folder)


def test_other_files_are_never_taken_for_jobs(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_bytes(b"no database at all " * 100)
    with pytest.raises(LongctxError, match=r"the file is no database.*move it away"):
        JobStore(tmp_path)
    assert (tmp_path / DATABASE).read_bytes() == b"no database at all " * 100
    (tmp_path / DATABASE).unlink()
    JobStore(tmp_path).close()
    db = sqlite3.connect(tmp_path / DATABASE)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(LongctxError, match=r"written by another version of longctx .format 99.*move it away"):
        JobStore(tmp_path)
