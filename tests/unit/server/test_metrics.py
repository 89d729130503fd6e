"""What is counted, once and never less than before, under names that dashboards can rely on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from longctx.events import Event, FinishEvent, ProgressEvent, Timings, TokenEvent, Usage
from longctx.server import metrics as module
from longctx.server.messages import EngineStats, ModelInfo
from longctx.server.metrics import Metrics


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Record:
    endpoint: str = "completions"
    arrived_s: float = 100.0


@dataclass(frozen=True)
class Restarted:
    request_id: str


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"longctx_{name}", labels)


def finish(reason: str = "stop", queue_ms: float = 250.0) -> FinishEvent:
    usage = Usage(prompt_tokens=1000, completion_tokens=3, cached_tokens=400, by_tier={"g1": 400})
    return FinishEvent("a", reason, "xyz", (1, 2, 3), usage, Timings(queue_ms, 900.0, 10.0, 5.0, 2000.0), 600)


def token(index: int, request_id: str = "a") -> TokenEvent:
    return TokenEvent(request_id, 7, "x", index)


def stats(engine: int = 1, **counters: int) -> EngineStats:
    return EngineStats(1, 2, {"g1": {"held": 30, "cached": 50, "cap": 100}}, counters, engine)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    return Metrics(clock)


def test_first_token_and_the_gaps_after_it(metrics: Metrics, clock: Clock) -> None:
    record = Record()
    metrics.observe_event(record, ProgressEvent("a", "prefill", 1000, 400, 700, 10.0, None))
    for index, now_s in enumerate((104.0, 104.5, 106.0)):
        clock.now_s = now_s
        metrics.observe_event(record, token(index))
    assert value(metrics, "time_to_first_token_seconds_sum") == 4.0
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_latency_seconds_sum") == 2.0
    assert value(metrics, "inter_token_latency_seconds_count") == 2


def test_requests_running_side_by_side_have_their_own_gaps(metrics: Metrics, clock: Clock) -> None:
    for now_s, request_id, index in ((101, "a", 0), (102, "b", 0), (103, "a", 1), (109, "b", 1)):
        clock.now_s = float(now_s)
        metrics.observe_event(Record(), token(index, request_id))
    assert value(metrics, "inter_token_latency_seconds_sum") == 2.0 + 7.0


def test_the_end_of_a_request(metrics: Metrics) -> None:
    metrics.observe_event(Record("chat"), finish("length"))
    metrics.observe_event(Record("chat"), finish("cancelled", queue_ms=1750.0))
    assert value(metrics, "requests_total", endpoint="chat", outcome="length") == 1
    assert value(metrics, "requests_total", endpoint="chat", outcome="cancelled") == 1
    assert value(metrics, "queue_time_seconds_sum") == 2.0
    assert value(metrics, "request_duration_seconds_sum") == 4.0
    assert value(metrics, "request_prompt_tokens_sum") == 2000
    assert value(metrics, "request_answer_tokens_sum") == 6


def test_a_request_that_runs_again_is_no_slow_token(metrics: Metrics, clock: Clock) -> None:
    events: tuple[tuple[float, Event | Restarted], ...] = (
        (101.0, token(0)),
        (102.0, token(1)),
        (130.0, Restarted("a")),
        (150.0, token(0)),
        (151.0, token(1)),
    )
    for now_s, event in events:
        clock.now_s = now_s
        metrics.observe_event(Record(), event)
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_latency_seconds_sum") == 1.0 + 1.0


def test_a_restart_before_the_first_token_leaves_the_first_token_to_come(metrics: Metrics, clock: Clock) -> None:
    metrics.observe_event(Record(), Restarted("a"))
    clock.now_s = 109.0
    metrics.observe_event(Record(), token(0))
    assert value(metrics, "time_to_first_token_seconds_sum") == 9.0


def test_requests_without_an_end_are_forgotten(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 3)
    for number in range(10):
        metrics.observe_event(Record(), token(0, f"r{number}"))
    assert len(metrics._last_token_s) == 3
    metrics.observe_error(Record(), "r9")
    assert len(metrics._last_token_s) == 2
    assert value(metrics, "requests_total", endpoint="completions", outcome="error") == 1


def test_tokens_by_source(metrics: Metrics) -> None:
    metrics.observe_stats(
        stats(prefill_tokens=600, cached_tokens_g1=300, cached_tokens_g3=100, missed_tokens=600, decode_tokens=9)
    )
    sources = {s: value(metrics, "prefill_tokens_total", source=s) for s in ("computed", "g1", "g2", "g3", "g4")}
    assert sources == {"computed": 600, "g1": 300, "g2": 0, "g3": 100, "g4": 0}
    assert value(metrics, "missed_tokens_total") == 600
    assert value(metrics, "decode_tokens_total") == 9
    assert value(metrics, "fetch_decisions_total", decision="recompute") == 0


def test_the_same_snapshot_counts_once(metrics: Metrics) -> None:
    for _ in range(3):
        metrics.observe_stats(stats(steps=5))
    metrics.observe_stats(stats(steps=7))
    assert value(metrics, "steps_total") == 7


@pytest.mark.parametrize("steps_after", [2, 5, 9])
def test_totals_go_on_after_an_engine_restart(metrics: Metrics, steps_after: int) -> None:
    """A new engine counts from zero; it may have passed the old one's count before anyone looked."""
    metrics.observe_stats(stats(engine=1, steps=5))
    metrics.observe_stats(stats(engine=2, steps=steps_after))
    metrics.observe_stats(stats(engine=2, steps=steps_after + 1))
    assert value(metrics, "steps_total") == 5 + steps_after + 1


def test_totals_never_fall_even_if_the_engine_is_not_named(metrics: Metrics) -> None:
    metrics.observe_stats(stats(engine=0, steps=5, preemptions=2))
    metrics.observe_stats(stats(engine=0, steps=1, preemptions=0))
    assert value(metrics, "steps_total") == 6
    assert value(metrics, "preemptions_total") == 2


def test_kv_memory_by_tier_and_state(metrics: Metrics) -> None:
    metrics.observe_stats(replace(stats(), kv={"g1": {"held": 30, "cached": 50, "cap": 100}, "g2": {"cap": 7}}))
    states = {state: value(metrics, "kv_bytes", tier="g1", state=state) for state in ("held", "cached", "free")}
    assert states == {"held": 30, "cached": 50, "free": 20}
    assert value(metrics, "kv_bytes", tier="g2", state="free") == 7


def test_a_dead_engine_runs_nothing(metrics: Metrics) -> None:
    metrics.observe_stats(stats())
    metrics.observe_engine(ready=True, restarts=0)
    assert value(metrics, "engine_up") == 1
    assert value(metrics, "requests_running") == 1
    for _ in range(2):
        metrics.observe_engine(ready=False, restarts=1)
    assert value(metrics, "engine_up") == 0
    assert value(metrics, "requests_running") == 0
    assert value(metrics, "requests_waiting") == 0
    assert value(metrics, "engine_restarts_total") == 1


def test_the_model_is_named_once(metrics: Metrics) -> None:
    info = ModelInfo("old", "folder", 10, 10, 10, "float32", "fp32", 1, 1, 1, 16, (), {})
    metrics.observe_engine(ready=True, restarts=0, info=info)
    metrics.observe_engine(ready=True, restarts=0, info=replace(info, model="new"))
    assert value(metrics, "model_info", model="new", dtype="float32", kv_format="fp32") == 1
    assert value(metrics, "model_info", model="old", dtype="float32", kv_format="fp32") is None


def test_labels_are_bounded_whatever_a_client_sends(metrics: Metrics) -> None:
    for number in range(50):
        metrics.observe_http(f"BREW{number}", None, 404, 0.01)
    metrics.observe_http("GET", "/v1/requests/{request_id}", 200, 0.01)
    (family,) = (f for f in metrics.registry.collect() if f.name == "longctx_http_requests")
    samples = {tuple(s.labels.values()): s.value for s in family.samples if s.name.endswith("_total")}
    assert samples == {("other", "other", "404"): 50, ("GET", "/v1/requests/{request_id}", "200"): 1}


def test_refusals_by_code(metrics: Metrics) -> None:
    metrics.observe_refusal("chat", "context_length_exceeded")
    metrics.observe_refusal("chat", None)
    assert value(metrics, "refused_total", endpoint="chat", code="context_length_exceeded") == 1
    assert value(metrics, "refused_total", endpoint="chat", code="other") == 1


def test_what_is_rendered_parses_and_keeps_its_names(metrics: Metrics) -> None:
    metrics.observe_event(Record(), token(0))
    metrics.observe_event(Record(), finish())
    metrics.observe_stats(stats(steps=1))
    metrics.observe_engine(ready=True, restarts=0)
    metrics.observe_http("GET", "/health", 200, 0.001)
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    families = {family.name for family in text_string_to_metric_families(body.decode())}
    ours = {name.removeprefix("longctx_") for name in families if name.startswith("longctx_")}
    assert ours - {name for name in ours if name.endswith("_created")} == {
        "requests",
        "refused",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "queue_time_seconds",
        "request_duration_seconds",
        "request_prompt_tokens",
        "request_answer_tokens",
        "prefill_tokens",
        "decode_tokens",
        "missed_tokens",
        "steps",
        "preemptions",
        "cancels",
        "fetch_decisions",
        "requests_running",
        "requests_waiting",
        "jobs",
        "kv_bytes",
        "engine_up",
        "engine_restarts",
        "model_info",
        "http_requests",
        "http_request_duration_seconds",
    }
    assert {name for name in families if not name.startswith("longctx_")} <= {
        f"process_{rest}"
        for rest in (
            "cpu_seconds",
            "virtual_memory_bytes",
            "resident_memory_bytes",
            "start_time_seconds",
            "open_fds",
            "max_fds",
        )
    }


def test_jobs_by_state() -> None:
    metrics = Metrics()
    for queued in (3, 1):
        metrics.observe_jobs({"queued": queued, "failed": 0})
    assert value(metrics, "jobs", state="queued") == 1 and value(metrics, "jobs", state="failed") == 0


def test_two_servers_in_one_process_count_apart() -> None:
    one, two = Metrics(), Metrics()
    one.observe_refusal("chat", "queue_full")
    assert value(two, "refused_total", endpoint="chat", code="queue_full") is None
