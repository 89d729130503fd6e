"""Records: who may see them, how many are kept, what they say."""

from __future__ import annotations

import logging

import pytest

from longctx.server.registry import ChoiceState, Registry
from tests.helpers.server_fakes import finish, progress, token


def test_tenants_see_only_their_own() -> None:
    registry = Registry()
    mine = registry.open("a", "chat", "me", alias="my-name")
    registry.open("b", "chat", "you", alias="my-name")
    assert [r.id for r in registry.list("me")] == ["a"] and registry.list(None) == []
    assert registry.get("b", "me") is None and registry.get("a", None) is None
    assert registry.get("my-name", "me") is mine


def test_a_record_is_found_by_a_responses_id_and_by_the_latest_alias() -> None:
    registry = Registry()
    first = registry.open("a", "chat", None, alias="x")
    assert all(registry.get(p + "a", None) is first for p in ("", "chatcmpl-", "cmpl-", "resp_"))
    registry.close(first, "finished")
    second = registry.open("b", "chat", None, alias="x")
    assert registry.get("x", None) is second
    assert registry.get("nosuch", None) is None


def test_only_the_last_finished_records_are_kept() -> None:
    registry = Registry(max_tracked=3)
    live = registry.open("live", "chat", None)
    for i in range(10):
        registry.close(registry.open(f"r{i}", "chat", None), "finished")
    assert [r.id for r in registry.list(None)] == ["live", "r9", "r8", "r7"]
    assert registry.live() == (live,)


def test_the_first_end_counts() -> None:
    registry = Registry()
    record = registry.open("a", "chat", None)
    registry.close(record, "error", "broke")
    registry.close(record, "finished")
    assert record.outcome == "error" and record.finish_reason == "error" and record.error == "broke"


def test_each_prompt_is_counted_once() -> None:
    """Two prompts with two choices each: four engine requests read two prompts' worth of the client's tokens."""
    registry = Registry()
    record = registry.open("a", "completions", None)
    registry.queued(record, [ChoiceState(10) for _ in range(4)], choices_per_prompt=2)
    assert record.usage() is None
    for choice, cached in enumerate((0, 9, 4, 9)):
        registry.observe(record, choice, finish(f"a-{choice}", prompt=10, tokens=3, cached=cached))
    usage = record.usage()
    assert usage["prompt_tokens"] == 20 and usage["completion_tokens"] == 12
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    assert usage["prompt_tokens_details"]["by_tier"] == {"g1": 4, "g2": 0, "g3": 0, "g4": 0}


def test_the_stage_is_the_least_advanced_one() -> None:
    registry = Registry()
    record = registry.open("a", "chat", None)
    assert record.stage == "tokenizing"
    registry.queued(record, [ChoiceState(10), ChoiceState(10)])
    assert record.stage == "queued"
    registry.observe(record, 0, token("a-0", 0))
    assert record.stage == "queued"
    registry.observe(record, 1, progress("a-1", processed=5, eta_ms=10.0))
    assert record.stage == "prefill" and record.eta_ms == 10.0
    registry.observe(record, 1, finish("a-1"))
    assert record.stage == "decode"


def test_what_is_left_is_estimated_from_eta_and_pace() -> None:
    state = ChoiceState(10, max_tokens=101)
    assert state.remaining_ms() is None
    state.eta_ms = 500.0
    assert state.remaining_ms() == 500.0
    state.stage, state.generated, state.first_token_s, state.last_token_s = "decode", 51, 10.0, 15.0
    assert state.remaining_ms() == 5000.0


def test_the_log_has_one_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    """With its figures, without its text, and a warning only where the server failed."""
    registry = Registry()
    record = registry.open("good", "chat", "a-tenant")
    registry.queued(record, [ChoiceState(10)])
    registry.observe(record, 0, progress("good", "prefill", 4, cached=4))
    registry.observe(record, 0, token("good", 0))
    registry.observe(record, 0, finish("good", "stop", tokens=3, cached=4))
    with caplog.at_level(logging.INFO):
        registry.close(record, "finished")
        registry.close(record, "cancelled")
        registry.close(registry.open("long", "completions", None), "refused", "too long")
        registry.close(registry.open("broken", "completions", None), "error", "the engine died")
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO", "WARNING"]
    assert [r.request_id for r in caplog.records] == ["good", "long", "broken"]
    good, long, broken = (r.fields for r in caplog.records)
    assert (good["outcome"], good["endpoint"], good["tenant"]) == ("stop", "chat", "a-tenant")
    assert (good["prompt_tokens"], good["cached_tokens"], good["answer_tokens"]) == (10, 4, 3)
    assert (long["outcome"], long["error"]) == ("refused", "too long")
    assert (broken["outcome"], broken["error"]) == ("error", "the engine died")
    assert "secret" not in caplog.text + str([r.fields for r in caplog.records])
