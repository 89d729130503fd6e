"""A whole grid on a target that answers as told: scores, controls, resuming, and what makes a run no evidence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longctx.errors import LongctxError
from longctx.evals.depth_profile import Place, find_edge
from longctx.evals.html import html_page
from longctx.evals.niah import VARIANTS
from longctx.evals.registry import SUITES, find_suite
from longctx.evals.report import table_text
from longctx.evals.run import check_job
from longctx.evals.suite import EvalJob
from tests.helpers.fake_target import NUMBER, Fake, reader

ROOM = VARIANTS["single"].answer_tokens


def run(target: Fake, **job: Any) -> dict[str, Any]:
    suite = find_suite(job.pop("suite", "niah"))
    report = suite.run(EvalJob(**{"lengths": (256, 512), "depths": (0.0, 0.5, 1.0), **job}), target)
    json.dumps(report)
    assert report["eval"] == suite.name and "score" in report and "config" in report
    assert "<script" not in html_page(report) and table_text(report)
    return report


def test_the_default_is_one_number_per_length_and_depth() -> None:
    target = Fake()
    report = run(target, depths=(0.0, 0.25, 0.5, 0.75, 1.0))
    assert [(c["length"], c["depth"]) for c in report["cells"]] == [
        (n, d) for n in (256, 512) for d in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    assert all((c["score"], c["outcome"], c["cached_tokens"]) == (1.0, "found", 0) for c in report["cells"])
    assert report["score"] == 1.0 and report["failure"] is None and report["suspect"] is None
    assert [(c["length"], c["outcome"]) for c in report["controls"]] == [(256, "clean"), (512, "clean")]
    prompts = [prompt for prompt, _ in target.asked]
    assert len(prompts) == 12 and sum(not NUMBER.search(prompt) for prompt in prompts) == 2
    assert {len(p.split()) for p in prompts} == {256 - ROOM, 512 - ROOM}


def test_controls_are_outside_cells_and_score() -> None:
    report = run(Fake(says=lambda prompt: "nothing"))
    assert report["score"] == 0.0 and len(report["cells"]) == 6
    assert {cell["outcome"] for cell in report["cells"]} == {"wrong"}


def test_each_cell_is_cold_unless_warm() -> None:
    target = Fake()
    run(target)
    salts = [salt for _, salt in target.asked]
    assert len(set(salts)) == len(salts) and None not in salts
    again = Fake()
    run(again)
    assert not set(salts) & {salt for _, salt in again.asked}, "a second run must not find the first one's blocks"
    shared = Fake()
    run(shared, warm=True)
    assert len({salt for _, salt in shared.asked}) == 1


def test_a_cold_cell_that_was_cached_is_void() -> None:
    """inference-atlas#14: prompts that were used before made a cached prefill look cold."""
    report = run(Fake(cached=96))
    assert "6 of 6 cold cells took tokens from the cache" in report["failure"]
    assert report["cells"][0]["cached_tokens"] == 96
    assert run(Fake(cached=96), warm=True)["failure"] is None
    assert run(Fake(cached=None))["failure"] is None, "a server that does not say is believed"


def test_an_answer_without_its_needle_is_no_proof() -> None:
    report = run(Fake(says=lambda prompt: " ".join(str(n) for n in range(10_000, 100_000))))
    assert "answered without their needle" in report["failure"]


def test_a_prompt_that_was_read_short_is_called_truncated() -> None:
    report = run(Fake(says=lambda prompt: "nothing", reads=0.5))
    assert {cell["outcome"] for cell in report["cells"]} == {"truncated"}


def test_variants_and_samples_have_cells_of_their_own() -> None:
    report = run(Fake(), names=("multi-value", "distractors"), samples=3, lengths=(512,))
    assert [cell["task"] for cell in report["cells"]] == ["distractors"] * 3 + ["multi-value"] * 3
    assert all(len(cell["tries"]) == 3 for cell in report["cells"])
    assert len({attempt["answer"] for cell in report["cells"] for attempt in cell["tries"]}) == 18
    assert report["by_task"] == {"distractors": 1.0, "multi-value": 1.0}
    assert [c["task"] for c in report["controls"]] == ["multi-value", "distractors"]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = run(Fake(), out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(Fake(die_after=3), out=tmp_path / "out")
    with (tmp_path / "out" / "records.jsonl").open("a") as file:
        file.write('{"kind": "cell", "length": 25')  # a kill in the middle of a line
    assert not (tmp_path / "out" / "report.json").exists()
    rest = Fake()
    report = run(rest, out=tmp_path / "out")
    assert len(rest.asked) == 8 - 3

    def same(cells: list[dict[str, Any]]) -> list[Any]:
        return [{k: v for k, v in cell.items() if k != "tries"} for cell in cells]

    assert same(report["cells"]) == same(whole["cells"])
    done = Fake()
    assert run(done, out=tmp_path / "out")["cells"] == report["cells"] and not done.asked


def test_results_carry_their_config_and_are_never_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(Fake(), out=out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(before) == {"config.json", "records.jsonl", "report.json", "report.html"}
    config = json.loads(before["config.json"])
    assert config["seed"] == 0 and config["depths"] == [0.0, 0.5, 1.0] and config["haystack"]["digest"]
    for change in ({"seed": 1}, {"depths": (0.5,)}, {"samples": 2}):
        with pytest.raises(LongctxError, match="another configuration"):
            run(Fake(), out=out, **change)
    with pytest.raises(LongctxError, match=r"model: 'fake' there, 'other' now"):
        run(Fake(name="other"), out=out)
    run(Fake(), out=out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(LongctxError, match=r"has other files in it \(thesis.txt\)"):
        run(Fake(), out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"lengths": (8192,)}, "--lengths 8192 is beyond the 4096 tokens"),
        ({"lengths": (4,)}, "4"),
        ({"depths": (1.5,)}, "--depths 1.5 must lie between 0"),
        ({"names": ("no-such",)}, "--tasks no-such"),
        ({"samples": 0}, "--samples 0"),
        ({"control": "some"}, "--control some must be none, one, all"),
    ],
)
def test_what_is_asked_wrongly_is_refused_before_the_model_is_asked(suite: str, job: Any, message: str) -> None:
    target = Fake()
    with pytest.raises(LongctxError, match=re.escape(message)):
        run(target, suite=suite, **job)
    assert not target.asked


def test_an_unknown_suite_names_those_there_are() -> None:
    with pytest.raises(LongctxError, match="niah"):
        find_suite("no-such")


def test_default_lengths_fit_the_target() -> None:
    report = run(Fake(longest=1024), lengths=None, depths=(0.5,))
    assert [cell["length"] for cell in report["cells"]] == [512, 1024]
    check_job(EvalJob(lengths=(1024,)), Fake(longest=1024), find_suite("niah"))


# -- the profile over depths ---------------------------------------------------------------------------------------


def seen_within(window: int) -> Callable[[str], str]:
    """A model that finds what stands in its last `window` words only."""
    return lambda prompt: reader(" ".join(prompt.split()[-window:]))


def test_an_edge_at_a_distance_from_the_end_is_suspect() -> None:
    """FlagEmbedding#422: only needles in the last few thousand tokens were found; the report showed a weak model."""
    depths = tuple(i / 8 for i in range(9))
    report = run(Fake(says=seen_within(300)), lengths=(512, 1024, 2048), depths=depths)
    found = re.search(r"up to ([\d,]+) tokens before the end are found, those ([\d,]+)", report["suspect"])
    assert found
    near, far = (int(text.replace(",", "")) for text in found.groups())
    assert near <= 300 + 20 <= far <= 400, "the prompt's head counts as haystack here"
    assert "configuration suspect" in html_page(report)


@pytest.mark.parametrize("says", [reader, lambda prompt: "no"], ids=["finds all", "finds nothing"])
def test_without_an_edge_nothing_is_suspect(says: Callable[[str], str]) -> None:
    assert run(Fake(says=says), lengths=(512, 1024, 2048))["suspect"] is None


def test_long_prompts_being_harder_is_no_edge() -> None:
    places = [Place(n, round(n * (1 - d)), float(n < 1000)) for n in (500, 4000) for d in (0, 0.25, 0.5, 0.75, 1)]
    assert find_edge(places, {}) is None


def test_an_edge_is_named_by_the_size_that_lies_there() -> None:
    places = [Place(n, d, float(d < 512)) for n in (2000, 4000) for d in (0, 100, 300, 500, 600, 1000, 1900)]
    edge = find_edge(places, {"the window of 512": 512, "the model's last position": 8192})
    assert edge is not None and "the window of 512 (512) lies there" in str(edge)
    assert find_edge(places, {"the model's last position": 8192}) is None, "a weak model is not a wrong setting"
