"""The server under load on loopback: what its clients feel, and what is left of it afterwards."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from longctx.errors import LongctxError
from longctx.evals.bench.job import Bench, Column, Job, Result, Row
from longctx.evals.bench.live import Live, Streamed, live_server
from longctx.evals.bench.runs import FIRST_ID
from longctx.evals.bench.together import percentile

CLIENTS = 8
SHORT_TOKENS = 32
MIXED_REQUESTS = 200
BODY_BYTES = 40 * 10**6
POLL_S = 0.02
ETA_SHARES = (0.2, 0.5, 0.8)


def run(job: Job) -> Result:
    """Three loads on a fresh server: short completions beside a long prompt, a huge body beside a prefill, and many
    mixed requests of which some are cancelled or dropped. `lengths` has the long prompt's cell (default: the longest).
    """
    assert job.model is not None
    job.say(f"starting longctx serve {job.model}")
    with live_server(job.model, "--max-running", str(CLIENTS + 1)) as live:
        card = live.get("/v1/models")["data"][0]
        longest, vocab = int(card["longest_request"]), int(card["vocab_size"])
        length = min(job.lengths[0] if job.lengths else longest, longest)
        if length < 512:
            raise LongctxError(f"--lengths {length}: bench serve needs a long prompt of at least 512 tokens")
        # Ids in the middle of a vocabulary are words, and not special tokens.
        prompts = _Words(vocab // 8, vocab // 2)
        live.stream(prompts.fresh(64), 4)
        rows = [
            Row(job.model, length, {"load": "short beside long", **_beside(job, live, prompts, length)}),
            Row(job.model, length, {"load": "huge body", **_huge_body(job, live, prompts, length)}),
            Row(job.model, None, {"load": "mixed", **_mixed(job, live, prompts, longest)}),
        ]
    lost = rows[2].figures["lost"]
    failure = f"{lost} of {MIXED_REQUESTS} requests were lost" if lost else None
    return Result(rows, failure=failure)


class _Words:
    """Random prompts as token ids, never the same twice; safe to share between threads."""

    def __init__(self, low: int, high: int):
        self._low, self._high = max(low, FIRST_ID), high
        self._dice = random.Random(0)

    def fresh(self, n: int) -> list[int]:
        return [self._dice.randrange(self._low, self._high) for _ in range(n)]


def _beside(job: Job, live: Live, prompts: _Words, length: int) -> dict[str, Any]:
    """Inter-token latency of eight clients of short completions, alone and beside one long prompt."""
    job.say(f"{CLIENTS} clients of short completions, alone")
    alone = _clients(live, prompts, lambda done: done >= 2)
    job.say(f"the same beside a prompt of {length - 1:,} tokens")
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(_clients, live, prompts, lambda _: over.is_set())
        long = live.stream(prompts.fresh(length - 1), 1)
        over.set()
        beside = future.result()
    gaps, mixed = _gaps(alone), _gaps(beside)
    return {
        "itl_alone_p50_s": percentile(gaps, 0.5),
        "itl_alone_p99_s": percentile(gaps, 0.99),
        "itl_beside_p50_s": percentile(mixed, 0.5),
        "itl_beside_p99_s": percentile(mixed, 0.99),
        "ttft_beside_p50_s": percentile([s.token_s[0] - s.sent_s for s in beside if s.token_s], 0.5),
        "completions_beside": len(beside),
        "long_ttft_s": (long.token_s or [float("nan")])[0] - long.sent_s,
        "head_s": (long.head_s or float("nan")) - long.sent_s,
    }


def _clients(live: Live, prompts: _Words, enough: Callable[[int], bool]) -> list[Streamed]:
    """Short completions from every client, one after the other, until `enough(completions of this client)`."""

    def client(number: int) -> list[Streamed]:
        done: list[Streamed] = []
        while not enough(len(done)):
            done.append(live.stream(prompts.fresh(64), SHORT_TOKENS, ignore_eos=True, cache_salt=f"client {number}"))
        return done

    with ThreadPoolExecutor(CLIENTS) as pool:
        return [streamed for each in pool.map(client, range(CLIENTS)) for streamed in each]


def _gaps(streams: Sequence[Streamed]) -> list[float]:
    return [gap for streamed in streams for gap in streamed.gaps_s]


def _huge_body(job: Job, live: Live, prompts: _Words, length: int) -> dict[str, Any]:
    """A prefill with a stream and a body of 40 MB beside it: health, gaps, progress, ETA; then cancel a prefill."""
    job.say(f"a prefill of {length - 1:,} tokens beside a stream and a body of {BODY_BYTES // 10**6} MB")
    over = threading.Event()
    polls: list[float] = []
    tokens = length - 64  # more than anyone waits for

    def poll_health() -> None:
        while not over.is_set():
            start_s = time.perf_counter()
            live.call("GET", "/health")
            polls.append(time.perf_counter() - start_s)
            time.sleep(POLL_S)

    body = json.dumps({"model": live.model, "prompt": "word " * (BODY_BYTES // 5), "max_tokens": 1}).encode()
    with ThreadPoolExecutor(3) as pool:
        health = pool.submit(poll_health)
        stream = pool.submit(live.stream, prompts.fresh(64), tokens, ignore_eos=True, seen=lambda _: not over.is_set())
        time.sleep(1.0)
        heavy = pool.submit(live.call, "POST", "/v1/completions", body)
        start_s = time.perf_counter()
        long = live.stream(prompts.fresh(length - 1), 1)
        end_s = time.perf_counter()
        status = heavy.result()[0]
        over.set()
        gaps = [
            gap
            for at_s, gap in zip(stream.result().token_s[1:], stream.result().gaps_s, strict=True)
            if start_s <= at_s <= end_s
        ]
        health.result()
    return {
        "health_p99_s": percentile(polls, 0.99),
        "longest_gap_s": max(gaps, default=float("nan")),
        "body_status": status,
        "head_s": (long.head_s or float("nan")) - long.sent_s,
        **_progress_figures(long),
        "cancel_to_next_s": _cancel(job, live, prompts, length),
    }


def _progress_figures(long: Streamed) -> dict[str, Any]:
    """Whether progress only grows and ends at the prompt's length, and how far off the ETA was on the way."""
    steps = [p["processed"] for _, p in long.progress]
    first_s = (long.token_s or [float("nan")])[0]
    errors = {}
    for share in ETA_SHARES:
        at = next(((t, p) for t, p in long.progress if p["processed"] >= share * p["total"] and p["eta_ms"]), None)
        if at is not None:
            left_s = first_s - at[0]
            errors[f"eta_error_{share:.0%}"] = abs(at[1]["eta_ms"] / 1e3 - left_s) / left_s if left_s > 0 else None
    computed = (long.usage or {}).get("prompt_tokens")
    return {
        "progress_monotone": steps == sorted(steps),
        "progress_complete": bool(steps) and steps[-1] == computed,
        "progress_events": len(steps),
        **errors,
    }


def _cancel(job: Job, live: Live, prompts: _Words, length: int) -> float:
    """Seconds from a DELETE in the middle of a prefill to the first token of the request that comes next."""
    job.say("cancelling a prefill in its middle")
    deleted: list[float] = []

    def delete_in_the_middle(streamed: Streamed) -> bool:
        _, progress = streamed.progress[-1] if streamed.progress else (0.0, {"processed": 0, "total": 1})
        if not deleted and progress["processed"] > 0.3 * progress["total"]:
            deleted.append(time.perf_counter())
            live.call("DELETE", f"/v1/requests/{streamed.request_id}")
            return False
        return True

    live.stream(prompts.fresh(length - 1), 1, seen=delete_in_the_middle)
    after = live.stream(prompts.fresh(16), 1, ignore_eos=True)
    return after.token_s[0] - deleted[0] if deleted and after.token_s else float("nan")


def _mixed(job: Job, live: Live, prompts: _Words, longest: int) -> dict[str, Any]:
    """Two hundred requests of all sizes from eight clients; one in four is cancelled or dropped at a random place."""
    job.say(f"{MIXED_REQUESTS} mixed requests")
    dice = random.Random(1)
    plans = [
        (prompts.fresh(dice.randrange(1, min(1024, longest // 2))), dice.randrange(1, 24), dice.choice("wwwwwwdc"))
        for _ in range(MIXED_REQUESTS)
    ]

    def one(plan: tuple[list[int], int, str]) -> str:
        ids, max_tokens, fate = plan
        events = 0

        def seen(streamed: Streamed) -> bool:
            nonlocal events
            events += 1
            if fate == "w" or events < 1 + len(ids) % 5:
                return True
            if fate == "c":
                live.call("DELETE", f"/v1/requests/{streamed.request_id}")
            return fate == "c"

        streamed = live.stream(ids, max_tokens, ignore_eos=True, seen=seen)
        if fate != "w":
            return "left"
        return "ended" if streamed.finish_reason == "length" else "lost"

    before_bytes = _resident(live)
    start_s = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        outcomes = list(pool.map(one, plans))
    took_s = time.perf_counter() - start_s
    return {
        "requests": MIXED_REQUESTS,
        "lost": outcomes.count("lost"),
        "left_early": outcomes.count("left"),
        "seconds": took_s,
        "held_bytes_after": _settled_held_bytes(live),
        "rss_growth_bytes": _resident(live) - before_bytes,
    }


def _settled_held_bytes(live: Live) -> int:
    """Bytes of the cache that running requests hold once nothing runs any more; anything but 0 is a leak."""
    for _ in range(100):
        text = live.call("GET", "/metrics")[2].decode()
        held = sum(float(v) for v in re.findall(r'^longctx_kv_bytes\{[^}]*state="held"[^}]*\} (\S+)', text, re.M))
        running = sum(float(v) for v in re.findall(r"^longctx_requests_running(?:\{[^}]*\})? (\S+)", text, re.M))
        if not held and not running:
            return 0
        time.sleep(0.1)
    return int(held)


def _resident(live: Live) -> int:
    """Resident bytes of the HTTP process, as its metrics say."""
    text = live.call("GET", "/metrics")[2].decode()
    found = re.search(r"^process_resident_memory_bytes (\S+)", text, re.M)
    return int(float(found[1])) if found else 0


BENCH = Bench(
    "serve",
    "the server under load: latency, a huge body, cancels, leaks",
    run,
    (
        Column("load", "load", "s"),
        Column("itl_alone_p50_s", "ITL p50 ms", ".0f", 1e3),
        Column("itl_alone_p99_s", "p99", ".0f", 1e3),
        Column("itl_beside_p50_s", "beside p50 ms", ".0f", 1e3),
        Column("itl_beside_p99_s", "p99", ".0f", 1e3),
        Column("long_ttft_s", "long TTFT s", ".1f"),
        Column("head_s", "head ms", ".0f", 1e3),
        Column("health_p99_s", "health p99 ms", ".0f", 1e3),
        Column("longest_gap_s", "longest gap ms", ".0f", 1e3),
        Column("cancel_to_next_s", "cancel to next ms", ".0f", 1e3),
        Column("eta_error_20%", "ETA off at 20 %", ".0%"),
        Column("eta_error_50%", "50 %", ".0%"),
        Column("eta_error_80%", "80 %", ".0%"),
        Column("requests", "requests", "d"),
        Column("lost", "lost", "d"),
        Column("held_bytes_after", "held after", "d"),
        Column("rss_growth_bytes", "RSS growth MB", ".1f", 1e-6),
    ),
)
