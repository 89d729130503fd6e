"""Every benchmark end to end on tiny models: its JSON, its table, and what makes a run void. No timing is judged."""

from __future__ import annotations

import json
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest

from longctx import LLM
from longctx.cli.app import main
from longctx.errors import EngineError, LongctxError
from longctx.evals.bench import main as bench_main
from longctx.evals.bench import needle, runs
from longctx.evals.bench.fit import fit_curve
from longctx.evals.bench.job import Job
from longctx.evals.bench.limits import FLOPS_PARTS, READ_PARTS, Limits, measure_limits, why_invalid
from longctx.evals.bench.main import find_bench, run_bench
from longctx.evals.bench.memory import GrowthWatch
from longctx.evals.bench.registry import BENCHES
from longctx.evals.bench.report import table_text
from longctx.evals.bench.runs import Prompts, open_engine, require_cold, run_cold, run_request
from longctx.quant.formats import FORMATS
from longctx.resident import peak_rss_bytes, reset_peak, resident_bytes
from tests.helpers.tiny import make_tiny

PARTS = {**dict.fromkeys(FLOPS_PARTS, 2e11), **dict.fromkeys(READ_PARTS, 2e10)}
LIMITS = Limits(2e11, 2e10, PARTS)
SCHEMA = {"model", "tokens", "limit", "share_of_limit"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Gemma 3 (window 32, one full layer of six) as a model folder."""
    path = tmp_path_factory.mktemp("tiny-gemma3")
    make_tiny("gemma3_text").save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))


def bench(name: str, model: str | None = None, **job: Any) -> dict[str, Any]:
    """One benchmark's report as JSON gives it back, with its rows' common keys checked."""
    found = find_bench(name)
    report = run_bench(found, Job(model, **{"repeats": 2, **job}), lambda: LIMITS)
    report = json.loads(json.dumps(report))
    assert {"rows", "machine", "config"} <= set(report)
    for row in report["rows"]:
        assert set(row) >= SCHEMA
    text = table_text(report, found.columns)
    assert report["machine"]["processor"] in text
    return report


def check_shares(report: dict[str, Any], figure: str) -> None:
    for row in report["rows"]:
        assert row["limit"] > 0 and row["share_of_limit"] == pytest.approx(row["limit"] / row[figure])
        assert row["times_floor"] == pytest.approx(1 / row["share_of_limit"])


def test_every_benchmark_is_tried_here() -> None:
    assert set(BENCHES) == {
        *("limits", "prefill", "decode", "kv-formats", "prefix", "needle"),
        *("mixed", "multiturn", "concurrency", "replay", "serve"),
    }


def test_limits_alone_and_with_a_model(folder: str) -> None:
    alone = bench("limits")
    assert [row["figure"] for row in alone["rows"]] == [*FLOPS_PARTS, *READ_PARTS]
    assert all(row["share_of_limit"] == 1.0 for row in alone["rows"])
    floors = [row for row in bench("limits", folder, lengths=(256, 512))["rows"] if row["model"]]
    assert [row["tokens"] for row in floors] == [256, 512]
    assert floors[1]["limit"] == pytest.approx(floors[1]["prefill_flops"] / 2e11)
    assert floors[1]["decode_floor_s"] == pytest.approx(floors[1]["decode_bytes"] / 2e10)


def test_prefill_is_cold_and_takes_the_whole_cell(folder: str) -> None:
    report = bench("prefill", folder, lengths=(64, 128, 256), profile=False)
    assert [(row["model"], row["tokens"]) for row in report["rows"]] == [(folder, 64), (folder, 128), (folder, 256)]
    check_shares(report, "ttft_s")
    for row in report["rows"]:
        assert row["cached_tokens"] == 0 and len(row["ttft_samples_s"]) == 2
        assert row["planned_growth_bytes"] > 0 and row["rss_growth_bytes"] is not None
    assert set(report["fit"]) == {"a", "b", "c", "worst_error", "c_floor"}
    # One full layer of six, four heads of 16: the only quadratic part.
    assert report["fit"]["c_floor"] == pytest.approx(4 * 4 * 16 / 2 / 2e11)


def test_prefill_beside_hugging_face_agrees_with_it(folder: str) -> None:
    (row,) = bench("prefill", folder, lengths=(128,), against="hf")["rows"]
    assert row["peer_same_first_tokens"] == 2 and len(row["peer_ttft_samples_s"]) == 2
    assert row["peer_over_ours"] > 0 and "rss_growth_bytes" not in row


def test_formats_read_the_bytes_they_store(folder: str) -> None:
    """One row for each format and length: the floor is what one token's attention reads, scales included."""
    report = bench("kv-formats", folder, lengths=(64, 600), options={"kv_format": "int4"})
    check_shares(report, "attention_s")
    rows = {(row["tokens"], row["kv_format"]): row for row in report["rows"]}
    assert {name for _, name in rows} == {"fp32", "int4"}
    for name in ("fp32", "int4"):
        fmt = FORMATS[name]
        short, long = rows[64, name], rows[600, name]
        # Two vectors of 16 in the full layer; the window's 32 keys in five others.
        vector = fmt.data_bytes(16) + fmt.scale_bytes(16)
        assert short["bytes_read"] == 2 * vector * (64 + 5 * 32) and long["bytes_read"] == 2 * vector * (600 + 5 * 32)
        assert long["attention_bytes_per_s"] == pytest.approx(long["bytes_read"] / long["attention_s"])
        assert len(long["attention_samples_s"]) == 2 * 8 and long["times_fp32"] > 0
    assert rows[600, "fp32"]["times_fp32"] == 1


def test_decode_counts_the_steps_it_says(folder: str) -> None:
    report = bench("decode", folder, lengths=(64, 128), tokens=4, profile=True)
    check_shares(report, "step_s")
    for row in report["rows"]:
        assert row["steps"] == 4 and len(row["step_samples_s"]) == 2
        assert row["attention_s"] > 0 and row["attention_bytes_per_s"] > 0
        assert row["attention_share_of_read"] == pytest.approx(row["attention_bytes_per_s"] / 2e10)
        profile = row["profile"]
        assert profile["steps"] == profile["tokens"] == 4
        assert all(profile[f"{part}_ms"] > 0 for part in ("linears", "lm_head", "attention", "norms", "rest"))
    # All weights once, and keys and values: 62 keys on the mean in the full layer, the window's 32 in five others.
    stored = 2 * 16 * 4
    more = (report["rows"][1]["limit"] - report["rows"][0]["limit"]) * 2e10
    assert more == pytest.approx(64 * stored)


def test_decode_beside_hugging_face_gives_the_same_tokens(folder: str) -> None:
    (row,) = bench("decode", folder, lengths=(96,), tokens=8, against="hf")["rows"]
    assert row["peer_same_tokens"] == 1.0 and len(row["peer_step_samples_s"]) == 2


def test_a_profiled_chunk_has_no_head_but_the_last(folder: str) -> None:
    options = {"chunk_tokens": 64}
    (row,) = bench("prefill", folder, lengths=(257,), profile=True, options=options)["rows"]
    assert row["profile"]["steps"] == row["num_chunks"] == 4 and row["profile"]["tokens"] == 256
    assert "rss_growth_bytes" not in row, "a profiler's events are no memory of a run"


def test_a_second_question_reuses_the_document(folder: str) -> None:
    (row,) = bench("prefix", folder, lengths=(300,), tokens=16)["rows"]
    assert row["question_tokens"] == 16 and row["cached_tokens"] >= 300 - 16 - 1
    assert row["limit"] > 0 and row["extra_s"] is not None


def test_a_document_that_fills_the_model_stays_cached(folder: str) -> None:
    """With room for one request alone, a cold question beside it evicts the document's last block."""
    (row,) = bench("prefix", folder, repeats=3, lengths=(4096,), tokens=16)["rows"]
    assert row["cached_tokens"] >= 4096 - 16 - 1


def test_needle_finds_all(tmp_path: Path) -> None:
    report = bench("needle", "gemma3-270m", lengths=(256, 512, 1024), tokens=2)
    assert report["failure"] is None and report["config"]["model"] is None
    for row in report["rows"]:
        assert row["model"] == "needle" and row["score"] == 1.0 and row["cached_tokens"] == 0
        assert [cell["depth"] for cell in row["cells"]] == pytest.approx([i / 10 for i in range(11)])
        assert all(cell["cached_tokens"] == row["tokens"] - 2 - 2 for cell in row["cells"][1:])
    assert set(report["prefill_fit"]) == {"a", "b", "c", "worst_error"}
    assert set(report["decode_fit"]) == {"a", "b", "worst_error"}


def test_a_missed_needle_fails_the_run_after_its_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needle.NeedleModel, "answer", lambda self, ids: 1 + self.vocab.expected(ids))
    monkeypatch.setattr(bench_main, "run_bench", lambda found, job: run_bench(found, job, lambda: LIMITS))
    assert main(["bench", "needle", "--lengths", "128", "--tokens", "2", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["rows"][0]["score"] == 0.0
    assert "missed 11 needles: depth 0.00 at 128 tokens" in captured.err


def test_a_reused_prompt_voids_a_cold_run(folder: str) -> None:
    """Prefill speed reported from cache hits because runs reuse prompts (0xBakeer/inference-atlas#14)."""
    with open_engine(Job(folder)) as (_, engine):
        ids = Prompts(engine.loaded.vocab_limit).fresh(300)
        run_cold(engine, ids, 1, "same")
        with pytest.raises(EngineError, match=r"cold run of 300 tokens took \d+ of them from the cache"):
            run_cold(engine, ids, 1, "same")
        assert require_cold(run_request(engine, ids, 1, salt="other"), 300).cached_tokens == 0


def test_prompts_never_repeat_and_are_those_of_every_run() -> None:
    one, two = Prompts(50), Prompts(50)
    first = [tuple(one.fresh(16)) for _ in range(20)]
    assert len(set(first)) == 20 and first == [tuple(two.fresh(16)) for _ in range(20)]
    assert len({one.fresh_salt() for _ in range(5)}) == 5
    assert all(3 <= token < 50 for ids in first for token in ids)


def test_an_engine_is_given_back_as_it_was(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread can serve again, and timers are gone, even when a run broke off."""
    opened: list[LLM] = []
    monkeypatch.setattr(runs, "LLM", lambda *args, **kwargs: opened.append(LLM(*args, **kwargs)) or opened[-1])

    def break_off() -> None:
        with open_engine(Job(folder)) as (_, engine):
            heard.append(engine.on_progress)
            engine.add([5] * 40, runs.SamplingParams(max_tokens=4))
            engine.step()
            raise KeyboardInterrupt

    heard: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert heard == [None]
    engine = opened[0].engine
    assert engine.on_progress is not None and not engine.has_work
    engine.check_integrity()


@pytest.mark.parametrize(
    ("name", "job", "message"),
    [
        ("prefill", {}, "bench prefill needs a MODEL"),
        ("prefix", {"model": "x", "against": "hf"}, "--against hf does not go with bench prefix: it has no peer"),
        ("decode", {"model": "x", "against": "vllm"}, "it can be compared with hf"),
        ("decode", {"model": "x", "repeats": 0}, "--repeats 0 must be at least 1"),
        ("decode", {"model": "x", "tokens": 0}, "--tokens 0 must be at least 1"),
    ],
)
def test_a_wrong_question_is_refused_before_anything_is_measured(name: str, job: dict[str, Any], message: str) -> None:
    def measure() -> Limits:
        raise AssertionError("measured")

    with pytest.raises(LongctxError, match=message):
        run_bench(find_bench(name), Job(**job), measure)


def test_lengths_must_fit(folder: str) -> None:
    for lengths, message in (((8192,), "--lengths 8192 is beyond the 4096 tokens"), ((4,), "must be at least 66")):
        with pytest.raises(LongctxError, match=message):
            bench("decode", folder, lengths=lengths)
    assert runs.lengths_for(Job("m"), (1024, 8192, 32768), 8192, 2) == [1024, 8192]
    assert runs.lengths_for(Job("m"), (1024,), 512, 2) == [512]


def test_dummy_weights_have_no_peer(folder: str) -> None:
    with pytest.raises(LongctxError, match="--against hf needs weights on disk"):
        bench("decode", folder, lengths=(96,), against="hf", options={"load_format": "dummy"})


def test_an_unknown_name_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speed", "gemma3-270m"]) == 2
    assert "there is no benchmark 'speed'; there are limits, prefill, decode" in capsys.readouterr().err


def test_results_are_kept_and_never_overwritten(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_main, "run_bench", lambda found, job: run_bench(found, job, lambda: LIMITS))
    out = tmp_path / "result.json"
    words = ["bench", "prefill", folder, "--lengths", "128", "--repeats", "1", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == json.loads(out.read_text())
    assert main(words) == 2
    assert "results are not overwritten" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "no" / "where.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_limits_are_measured_and_the_best_counts() -> None:
    limits = measure_limits(best_of=1, read_bytes=2**20, iterations=1000, gemm_size=64)
    assert set(limits.parts) == {*FLOPS_PARTS, *READ_PARTS}
    assert limits.flops == max(limits.parts[name] for name in FLOPS_PARTS) > 0
    assert limits.read_bytes_per_s == max(limits.parts[name] for name in READ_PARTS) > 0
    better = Limits(1.0, 9.0, {"a": 1.0, "b": 2.0}).better(Limits(2.0, 8.0, {"a": 0.5}))
    assert better == Limits(2.0, 9.0, {"a": 1.0, "b": 2.0})


def test_a_busy_machine_makes_a_run_invalid() -> None:
    fast = Limits(1e15, 2e10, {})
    assert why_invalid(fast, fast) == []
    assert "read_bytes_per_s moved" in why_invalid(fast, Limits(1e15, 1e10, {}))[0]
    assert len(why_invalid(fast, Limits(5e14, 2e10, {}))) == 1


def test_growth_is_what_came_after_the_weights(folder: str) -> None:
    if not (resident_bytes() and reset_peak()):
        pytest.skip("this system does not say")
    with open_engine(Job(folder)) as (_, engine):
        watch = GrowthWatch(engine)
        held = bytearray(b"x") * 50_000_000
        assert watch.growth_bytes() >= len(held) - PAGESIZE, "the first page may have been in use before"
        del held
        assert watch.growth_bytes() >= 49_000_000, "a peak is not forgotten"
        assert reset_peak() and peak_rss_bytes() <= resident_bytes() + 20_000_000


def test_curves_are_found_again() -> None:
    lengths = [1024, 8192, 32768, 65536]
    curve = fit_curve(lengths, [0.5 + 1e-4 * n + 3e-9 * n * n for n in lengths], 2)
    assert curve is not None
    assert (curve["a"], curve["b"], curve["c"]) == pytest.approx((0.5, 1e-4, 3e-9))
    assert curve["worst_error"] == pytest.approx(0.0, abs=1e-9)
    assert fit_curve([1, 2], [1.0, 2.0], 2) is None


def test_streams_beside_a_long_prefill_are_timed_apart(folder: str) -> None:
    (row,) = bench("mixed", folder, lengths=(512,), tokens=4, options={"chunk_tokens": 32})["rows"]
    assert row["tokens_meanwhile"] >= 4 * 10, "with chunks of 32 each stream gets a token beside every chunk"
    assert 0 < row["itl_alone_p50_s"] <= row["itl_alone_p99_s"]
    assert row["itl_mixed_p50_s"] <= row["itl_mixed_p99_s"] <= row["itl_mixed_max_s"]
    check_shares({"rows": [row]}, "long_ttft_s")


def test_each_turn_computes_only_what_is_new(folder: str) -> None:
    rows = bench("multiturn", folder, lengths=(400,), tokens=64)["rows"]
    assert [row["turn"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[0]["cached_tokens"] == 0
    # The last token of an answer was never fed back, so the next turn computes it with its own.
    assert [row["computed_tokens"] for row in rows[1:]] == [65] * 4
    assert [row["tokens"] for row in rows] == [64 + 80 * i for i in range(5)]


def test_clients_at_once_are_all_served(folder: str) -> None:
    rows = bench("concurrency", folder, lengths=(64,), tokens=8)["rows"]
    assert [row["clients"] for row in rows] == [1, 2, 4, 8]
    assert all(row["decode_tokens_per_s"] > 0 and row["ttft_p50_s"] <= row["ttft_max_s"] for row in rows)
    stored = rows[1]["limit"] - rows[0]["limit"]
    assert rows[3]["limit"] - rows[0]["limit"] == pytest.approx(7 * stored), "weights count once, caches for each"


def trace_file(tmp_path: Path, *lines: dict[str, Any]) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_trace_is_replayed_with_its_shared_beginnings(folder: str, tmp_path: Path) -> None:
    one = {"timestamp": 5000, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 9]}
    trace = trace_file(
        tmp_path,
        one,
        {**one, "timestamp": 6000, "hash_ids": [7, 8, 10]},
        {**one, "timestamp": 9000, "input_length": 10**6, "hash_ids": []},
    )
    (row,) = bench("replay", folder, trace=trace, speedup=100.0)["rows"]
    assert row["requests"] == 2 and row["left_out"] == 1 and row["decode_tokens"] == 6
    assert row["hit_rate"] == pytest.approx(1024 / 2200)
    assert row["prefill_tokens"] == 2200 - 1024


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"timestamp": 0, "input_length": 0, "output_length": 1}, "line 1: input_length"),
        ({"timestamp": 0, "output_length": 1}, "line 1: KeyError"),
        ({"timestamp": None, "input_length": 1, "output_length": 1}, "line 1: TypeError"),
    ],
)
def test_a_broken_trace_is_named(folder: str, tmp_path: Path, line: dict[str, Any], said: str) -> None:
    with pytest.raises(LongctxError, match=said):
        bench("replay", folder, trace=trace_file(tmp_path, line))
    with pytest.raises(LongctxError, match="--trace"):
        bench("replay", folder)
