"""The suites on real engines: engine faults are seen as such, and a server gives the scores of its own process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from longctx import LLM, SamplingParams, forward
from longctx.attention.span import AttnParams
from longctx.evals.depth_profile import Place, find_edge
from longctx.evals.needle_model import NeedleModel
from longctx.evals.niah import VARIANTS
from longctx.evals.reference import TOLERANCE
from longctx.evals.registry import find_suite
from longctx.evals.suite import EvalJob
from longctx.evals.target import LLMTarget
from longctx.evals.url_target import URLTarget
from tests.helpers.server import LiveServer, save_tiny

OPTIONS: dict[str, Any] = {"kv_memory": "32MiB", "block_tokens": 16, "max_running": 1}
ROOM = VARIANTS["single"].answer_tokens
JOB = EvalJob(lengths=(640, 1024), depths=(0.0, 0.5, 1.0))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Tiny models whose windows, soft-caps and rope regimes differ; a base model and one that chats."""
    root = tmp_path_factory.mktemp("models")
    kinds = ("gemma3_text", "gemma2", "phi3_longrope")
    made = {kind: save_tiny(root / kind, kind, template=None, peaky=True) for kind in kinds}
    return made | {"chat": save_tiny(root / "chat", "llama", peaky=True)}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))


@contextmanager
def target_of(folder: Path, **options: Any) -> Iterator[LLMTarget]:
    with LLM(str(folder), **OPTIONS, **options) as llm:
        yield LLMTarget(llm, folder.name)


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma2", "phi3_longrope", "chat"])
def test_a_right_engine_is_found_right_beside_a_model_that_finds_nothing(folders: Any, kind: str) -> None:
    """A random model misses every needle, and the report says that this is the model's doing."""
    with target_of(folders[kind]) as target:
        assert target.chat == (kind == "chat")
        report = find_suite("niah").run(replace(JOB, control="all"), target)
    assert report["score"] == 0.0 and report["failure"] is None
    assert report["engine"]["verdict"] == "ok" and report["engine"]["cells"] == 6
    assert report["engine"]["max_logprob_difference"] < TOLERANCE / 10
    assert {cell["cause"] for cell in report["cells"]} == {"model error"}
    assert all(cell["cached_tokens"] == 0 for cell in report["cells"])
    for cell in report["cells"]:
        assert cell["length"] * 0.99 <= cell["prompt_tokens"] + ROOM <= cell["length"], "template and answer included"


def one_key_more(params: AttnParams) -> AttnParams:
    return params if params.window is None else replace(params, window=params.window + 1)


def wrong_scale(params: AttnParams) -> AttnParams:
    return replace(params, scale=params.scale * 1.02)


def drop_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third block of every sequence is not looked at: its table entry is the null block."""
    view = forward.KVView
    batch = forward.DecodeBatch

    def without(table: np.ndarray) -> np.ndarray:
        table = table.copy()
        table[..., 3:4] = 0
        return table

    monkeypatch.setattr(forward, "KVView", lambda kv, table: view(kv, without(table)))
    monkeypatch.setattr(forward, "DecodeBatch", lambda tables, positions: batch(without(tables), positions))


@pytest.mark.parametrize("fault", ["one key more in windows", "wrong scale", "dropped block"])
def test_an_engine_fault_is_seen_as_engine_error(folders: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The score cannot tell: this model finds nothing with or without it. The control can, and the run is void."""
    if fault == "dropped block":
        drop_a_block(monkeypatch)
    else:
        change = wrong_scale if fault == "wrong scale" else one_key_more
        monkeypatch.setattr(forward, "AttnParams", lambda *args: change(AttnParams(*args)))
    with target_of(folders["gemma3_text"]) as target:
        report = find_suite("niah").run(JOB, target)
    assert report["engine"]["verdict"] == "engine error"
    assert report["engine"]["max_logprob_difference"] > 2 * TOLERANCE
    assert "engine error: at" in report["failure"]
    assert "engine error" in {cell.get("cause") for cell in report["cells"]}


def test_a_format_that_loses_something_is_not_called_an_error(folders: Any) -> None:
    with target_of(folders["gemma3_text"], kv_format="bf16") as target:
        report = find_suite("niah").run(JOB, target)
    assert report["engine"]["verdict"] == "lossy" and report["failure"] is None


def test_a_prompt_that_is_used_again_fails_the_run(folders: Any) -> None:
    """A salt that stays the same, as a suite without one would have it: the engine says what it took from its cache."""
    suite, job = find_suite("niah"), replace(JOB, lengths=(640,), control="none")
    with target_of(folders["chat"]) as target:
        ask = target.ask
        target.ask = lambda prompt, max_tokens, salt: ask(prompt, max_tokens, None)  # type: ignore[method-assign]
        first = suite.run(job, target)
        report = suite.run(job, target)
    assert "2 of 3 cold cells took tokens from the cache" in first["failure"], "they begin alike"
    assert "3 of 3 cold cells took tokens from the cache" in report["failure"]
    assert all(cell["cached_tokens"] > 600 for cell in report["cells"])


def test_warm_cells_share_their_beginnings_and_nothing_else(folders: Any) -> None:
    with target_of(folders["chat"]) as target:
        report = find_suite("niah").run(replace(JOB, lengths=(1024,), depths=(1.0, 0.5, 0.9), warm=True), target)
    assert report["failure"] is None and report["engine"]["verdict"] == "ok"
    cached = {cell["depth"]: cell["cached_tokens"] for cell in report["cells"]}
    assert cached[1.0] == 0 and 400 < cached[0.5] < 600 and 750 < cached[0.9] < 900


@pytest.mark.slow
@pytest.mark.parametrize("chat", [True, False])
def test_a_server_gives_the_answers_of_the_process(folders: Any, tmp_path: Path, chat: bool) -> None:
    job = replace(JOB, lengths=(512,), control="none", names=("single", "multi-value"))
    with LLM(str(folders["chat"]), **OPTIONS) as llm:
        inside = find_suite("niah").run(job, LLMTarget(llm, "chat", chat))
    with LiveServer(folders["chat"], "--kv-memory", "32MiB", cache=tmp_path / "cache") as server:
        target = URLTarget(server.url, chat=chat)
        assert target.name == server.name and target.longest is not None
        outside = find_suite("niah").run(job, target)
        assert URLTarget(server.url + "/v1/").chat, "a model with a template chats"
        target.close()
    assert outside["config"]["counted_by"] == "tokenize" and outside["failure"] is None
    assert outside["score"] == inside["score"]

    def answers(report: dict[str, Any]) -> list[Any]:
        names = ("answer", "outcome", "counted_tokens", "prompt_tokens", "completion_tokens", "cached_tokens")
        return [[cell["tries"][0][name] for name in names] for cell in report["cells"]]

    assert answers(outside) == answers(inside)


@pytest.mark.parametrize("window", [None, 256])
def test_a_window_where_none_belongs_shows_as_an_edge(tmp_path: Path, window: int | None) -> None:
    """FlagEmbedding#422 on a model whose recall is perfect: the same weights, once with a window set by mistake."""
    needles = NeedleModel(max_positions=4096)
    model = needles.build()
    fields = {k: v for k, v in needles.config.to_dict().items() if k not in ("model_type", "architectures")}
    windowed = MistralForCausalLM(MistralConfig(**fields, sliding_window=window)).eval()
    windowed.load_state_dict(model.state_dict())
    windowed.to(torch.float32).save_pretrained(tmp_path / "model")
    needles.vocab.tokenizer().save_pretrained(tmp_path / "model")
    places = []
    with LLM(str(tmp_path / "model"), **OPTIONS) as llm:
        sizes = LLMTarget(llm, "needle").sizes()
        for length in (512, 1024, 2048):
            for key, depth in enumerate(np.linspace(0, 1, 9)):
                ids = needles.make_prompt(length, {key: float(depth)}) + needles.query_ids(key)
                [out] = llm.generate(ids, SamplingParams(max_tokens=1))
                found = out.token_ids[0] == needles.answer(ids)
                places.append(Place(length, round(length * (1 - depth)), float(found)))
    edge = find_edge(places, sizes)
    if window is None:
        assert all(place.score == 1.0 for place in places) and edge is None
    else:
        assert edge is not None and edge.near <= 256 <= edge.far
        assert "configuration suspect" in str(edge) and "the window of 256" in str(edge)


def test_the_command_writes_json_page_and_picture(
    folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from longctx.cli.app import main

    out = tmp_path / "out"
    command = [
        "eval",
        "niah",
        str(folders["gemma3_text"]),
        "--lengths",
        "640",
        "--depths",
        "0,1",
        "--kv-memory",
        "32MiB",
    ]
    assert main([*command, "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert set(report) >= {"score", "cells", "config"} and "outcome" in report["cells"][0]
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "records.jsonl",
        "report.json",
        "report.html",
        "heatmap.png",
    }
    assert (out / "heatmap.png").read_bytes().startswith(b"\x89PNG")
    assert main([*command, "--out", str(out)]) == 0
    assert "score: 0.0% of 2 cells" in capsys.readouterr().out
    assert main([*command, "--out", str(out), "--seed", "5"]) == 2
    assert "another configuration (seed: 0 there, 5 now)" in capsys.readouterr().err
    assert main(["eval", "niah"]) == 2 and "needs a MODEL" in capsys.readouterr().err
    assert main(["eval", "niah", "--url", "http://127.0.0.1:9"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
