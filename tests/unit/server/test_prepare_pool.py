"""Bodies prepared beside the server: the same answers, whatever dies, and nobody waits for somebody else's."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from longctx.errors import ModelError
from longctx.server import prepare_pool
from longctx.server.errors import ApiError
from longctx.server.messages import ModelInfo
from longctx.server.prepare_pool import NICENESS, SMALL_BODY_BYTES, Preparer, Worker
from longctx.server.prepare_worker import Setup
from longctx.server.settings import ServerSettings
from longctx.server.text_side import TextSide
from longctx.server.text_tasks import perform
from tests.helpers.text_side import CHAT, make_info
from tests.helpers.tokenizers import byte_level_tokenizer

PATIENCE_S = 120.0
TEXT = "the quick brown fox jumps over the lazy dog. " * 2000
LARGE = json.dumps({"prompt": TEXT, "seed": 3, "n": 2}).encode()
SMALL = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
assert len(LARGE) > SMALL_BODY_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = CHAT
    try:
        tokenizer.save_pretrained(path)
    finally:
        tokenizer.chat_template = None
    return path


@pytest.fixture(scope="module")
def info(folder: Path) -> ModelInfo:
    return make_info(folder=str(folder), longest_request=10**6)


class Live:
    """A started preparer of one worker and its event loop, kept from test to test: a worker takes seconds to start."""

    def __init__(self, info: ModelInfo):
        self.runner = asyncio.Runner()
        self.preparer = Preparer(ServerSettings(), workers=1)
        self.runner.run(self.preparer.start(info))

    def run(self, work: Callable[[Preparer], Awaitable[None]]) -> None:
        self.runner.run(self._run(work))

    async def _run(self, work: Callable[[Preparer], Awaitable[None]]) -> None:
        await self.preparer.prepare("completions", LARGE)  # there is a worker, and it lives
        await asyncio.wait_for(work(self.preparer), PATIENCE_S)

    def close(self) -> None:
        self.runner.run(self.preparer.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def live(info: ModelInfo) -> Iterator[Live]:
    live = Live(info)
    yield live
    live.close()


async def worker_pid(preparer: Preparer, but: int | None = None) -> int:
    """The id of the worker's process, once there is one other than `but`."""
    while True:
        pid = preparer._workers[0].pid
        if pid is not None and pid != but:
            return pid
        await asyncio.sleep(0.02)


def local(info: ModelInfo, body: bytes, task: str = "completions") -> Any:
    text = TextSide.load(Path(info.folder), info.longest_request)
    return perform(task, body, text, ServerSettings(), info)


def test_a_worker_prepares_as_this_process_does(live: Live, info: ModelInfo) -> None:
    async def work(preparer: Preparer) -> None:
        far, near = await preparer.prepare("completions", bytearray(LARGE)), local(info, LARGE)
        assert far.options == near.options and far.endpoint == "completions"
        assert [w.params for w in far.works] == [w.params for w in near.works]
        assert far.works[0].token_ids.tolist() == near.works[0].token_ids.tolist()
        assert far.works[0].token_ids is far.works[1].token_ids
        large = json.dumps({"prompt": TEXT}).encode()
        assert json.loads(await preparer.tokenize(large)) == json.loads(local(info, large, "tokenize"))
        assert await preparer.plan(large) == local(info, large, "plan")
        # Another process did it, at its low priority.
        process = psutil.Process(await worker_pid(preparer))
        assert process.nice() == min(19, psutil.Process().nice() + NICENESS)

    live.run(work)


def test_small_bodies_need_no_worker(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(preparer: Preparer) -> None:
        monkeypatch.setattr(Worker, "call", None)
        assert (await preparer.prepare("chat", SMALL)).endpoint == "chat"
        assert b'"prompt": "' in await preparer.detokenize(b'{"tokens": [70]}')
        with pytest.raises(ApiError, match="not valid JSON"):
            await preparer.prepare("chat", b"{")
        assert preparer.tokenizer is not None

    live.run(work)


def test_a_refusal_comes_back_from_a_worker_as_it_was(live: Live) -> None:
    async def work(preparer: Preparer) -> None:
        with pytest.raises(ApiError) as caught:
            await preparer.prepare("completions", LARGE[:-1] + b', "top_p": 7}')
        assert (caught.value.status, caught.value.param) == (400, "top_p")
        with pytest.raises(ApiError) as caught:
            await preparer.prepare("completions", LARGE[:-1] + b', "model": "x"}')
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")

    live.run(work)


def test_a_small_body_does_not_wait_for_a_large_one(live: Live) -> None:
    async def work(preparer: Preparer) -> None:
        pid = await worker_pid(preparer)
        await preparer.prepare("completions", LARGE)
        os.kill(pid, signal.SIGSTOP)
        large = asyncio.create_task(preparer.prepare("completions", LARGE))
        await preparer.prepare("chat", SMALL)
        assert not large.done()
        os.kill(pid, signal.SIGCONT)
        await large

    live.run(work)


def test_a_worker_killed_inside_a_task_is_replaced_and_the_task_done_again(live: Live, info: ModelInfo) -> None:
    async def work(preparer: Preparer) -> None:
        pid, before = await worker_pid(preparer), preparer.restarts
        os.kill(pid, signal.SIGSTOP)
        task = asyncio.create_task(preparer.prepare("completions", LARGE))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        assert len((await task).works[0].token_ids) == len(local(info, LARGE).works[0].token_ids)
        assert await worker_pid(preparer) != pid and preparer.restarts == before + 1

    live.run(work)


def test_a_worker_killed_while_idle_is_replaced_before_anyone_asks(live: Live) -> None:
    async def work(preparer: Preparer) -> None:
        pid = await worker_pid(preparer)
        os.kill(pid, signal.SIGKILL)
        await worker_pid(preparer, but=pid)
        await preparer.prepare("completions", LARGE)

    live.run(work)


def test_a_body_that_kills_twice_is_given_up_and_the_next_one_is_served(live: Live) -> None:
    async def work(preparer: Preparer) -> None:
        first, killing = await worker_pid(preparer), True
        os.kill(first, signal.SIGSTOP)

        async def kill_all() -> None:
            pid = first
            os.kill(pid, signal.SIGKILL)
            while killing:
                pid = await worker_pid(preparer, but=pid)
                os.kill(pid, signal.SIGKILL)

        task = asyncio.create_task(preparer.prepare("completions", LARGE))
        await asyncio.sleep(0.1)
        killer = asyncio.create_task(kill_all())
        with pytest.raises(ApiError) as caught:
            await task
        assert (caught.value.status, caught.value.code) == (500, "prepare_failed")
        killer.cancel()
        await preparer.prepare("completions", LARGE)

    live.run(work)


def test_a_task_that_takes_too_long_is_ended(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(preparer: Preparer) -> None:
        pid = await worker_pid(preparer)
        # The body must be on its way before the worker stands still, or the sending waits for ever.
        monkeypatch.setattr(prepare_pool, "MAX_TASK_S", 0.0)
        with pytest.raises(ApiError) as caught:
            await preparer.prepare("completions", LARGE)
        assert (caught.value.status, caught.value.code) == (400, "prepare_timeout")
        monkeypatch.setattr(prepare_pool, "MAX_TASK_S", PATIENCE_S)
        await preparer.prepare("completions", LARGE)
        assert await worker_pid(preparer) != pid

    live.run(work)


def test_too_many_large_bodies_are_asked_to_come_again(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(preparer: Preparer) -> None:
        pid = await worker_pid(preparer)
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(preparer, "_settings", ServerSettings(max_body_bytes=len(LARGE)))
        waiting = [asyncio.create_task(preparer.prepare("completions", LARGE)) for _ in range(5)]
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError) as caught:
            await preparer.prepare("completions", LARGE)
        assert (caught.value.status, caught.value.code) == (429, "queue_full") and caught.value.retry_after_s
        os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*waiting)
        await preparer.prepare("completions", LARGE)

    live.run(work)


def test_a_body_nobody_waits_for_any_more_is_not_begun(live: Live) -> None:
    async def work(preparer: Preparer) -> None:
        pid = await worker_pid(preparer)
        os.kill(pid, signal.SIGSTOP)
        first, second = (asyncio.create_task(preparer.prepare("completions", LARGE)) for _ in range(2))
        await asyncio.sleep(0.05)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert preparer._workers[0]._thread._work_queue.qsize() <= 1  # at most the cancelled entry itself
        os.kill(pid, signal.SIGCONT)
        await first

    live.run(work)


@pytest.mark.slow
def test_stopping_refuses_what_waits_and_leaves_nothing_behind(info: ModelInfo) -> None:
    refused: list[ApiError] = []
    pids: list[int] = []
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("longctx-")}

    async def wait_for(preparer: Preparer) -> None:
        try:
            await preparer.prepare("completions", LARGE)
        except ApiError as error:
            refused.append(error)

    async def main() -> None:
        preparer = Preparer(ServerSettings(), workers=2)
        await preparer.start(info)
        await asyncio.gather(*(preparer.prepare("completions", LARGE) for _ in range(2)))
        pids.extend(worker.pid or 0 for worker in preparer._workers)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        tasks = [asyncio.create_task(wait_for(preparer)) for _ in range(5)]
        await asyncio.sleep(0.05)
        await preparer.stop()
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        with pytest.raises(ApiError):
            await preparer.prepare("chat", SMALL)

    asyncio.run(main())
    assert [error.code for error in refused] == ["draining"] * 5
    assert len(set(pids)) == 2 and not any(psutil.pid_exists(pid) for pid in pids)
    end_s = time.monotonic() + PATIENCE_S
    while left := {t for t in threading.enumerate() if t.name.startswith("longctx-")} - threads:
        assert time.monotonic() < end_s, left
        time.sleep(0.02)


def test_an_error_that_nobody_foresaw_tells_the_client_nothing(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a secret path")

    async def work(preparer: Preparer) -> None:
        monkeypatch.setattr(prepare_pool, "perform", fail)
        with pytest.raises(ApiError) as caught:
            await preparer.prepare("chat", SMALL)
        assert caught.value.status == 500 and "secret" not in str(caught.value.body())

    live.run(work)


def test_a_broken_template_ends_the_start(info: ModelInfo, tmp_path: Path) -> None:
    path = tmp_path / "broken.jinja"
    path.write_text("{% for %}")
    with pytest.raises(ModelError, match="no valid jinja template"):
        asyncio.run(Preparer(ServerSettings(chat_template=str(path))).start(info))


def test_a_worker_learns_no_keys() -> None:
    assert not {"api_keys", "settings"} & set(Setup.__dataclass_fields__)


@pytest.mark.slow
def test_a_worker_does_not_outlive_the_server(folder: Path) -> None:
    code = f"""
import asyncio
from longctx.server.prepare_pool import Preparer
from longctx.server.settings import ServerSettings
from tests.helpers.text_side import make_info
async def main():
    preparer = Preparer(ServerSettings(), workers=1)
    await preparer.start(make_info(folder={str(folder)!r}))
    while preparer._workers[0].pid is None:
        await asyncio.sleep(0.01)
    print(preparer._workers[0].pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
    worker.wait(PATIENCE_S)


@pytest.mark.slow
def test_a_body_of_64_mib_does_not_hold_this_process_up(live: Live) -> None:
    """Its JSON, its characters and its token count are somebody else's work: the loop stays live."""
    body = b'{"prompt": "' + b"word " * (64 * 2**20 // 5 - 10) + b'"}'
    gaps: list[float] = []

    async def watch() -> None:
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now_s = time.perf_counter()
            gaps.append(now_s - last_s)
            last_s = now_s

    async def work(preparer: Preparer) -> None:
        watcher = asyncio.create_task(watch())
        with pytest.raises(ApiError, match="characters"):
            await preparer.prepare("completions", body)
        watcher.cancel()

    live.run(work)
    gaps.sort()
    assert gaps[-1] < 1.0 and gaps[len(gaps) * 99 // 100] < 0.25, f"longest {gaps[-1]:.3f} s"
