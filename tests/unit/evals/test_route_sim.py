"""The routing simulator reproduces the textbook numbers, and its caches are real caches."""

from __future__ import annotations

import json

import pytest

from longctx.cli.app import main
from longctx.errors import LongctxError
from longctx.evals.route_sim import POLICIES, Workload, simulate


def test_four_users_on_three_replicas_are_the_textbook_numbers() -> None:
    results = simulate(Workload(users=4, turns=4, replicas=3, start_tokens=500, turn_tokens=200))
    assert results["round_robin"].prefill_tokens == 10_800
    assert results["cache_aware"].prefill_tokens == 4_400
    assert round(1 - 4_400 / 10_800, 2) == 0.59
    asked = 4 * (500 + 700 + 900 + 1100)
    assert results["cache_aware"].hit_rate == pytest.approx(1 - 4_400 / asked)


def test_without_cache_aware_routing_one_in_eight_finds_its_prefix() -> None:
    """Eight replicas, a second prompt that adds nothing: chance finds the first one in one case of eight."""
    work = Workload(users=4000, turns=2, replicas=8, start_tokens=800, turn_tokens=0)
    results = simulate(work)
    found = 2 * results["random"].hit_rate  # the first turns, half of all tokens, can find nothing
    assert found == pytest.approx(1 / 8, abs=0.02)
    assert 2 * results["cache_aware"].hit_rate == pytest.approx(1.0)


def test_one_replica_makes_every_policy_the_same() -> None:
    results = simulate(Workload(replicas=1))
    assert len({r.prefill_tokens for r in results.values()}) == 1
    assert results["round_robin"].prefill_tokens == 4_400


def test_a_shared_beginning_is_computed_once_per_replica_that_sees_it() -> None:
    with_shared = simulate(Workload(users=6, turns=1, replicas=2, shared_tokens=1000))["round_robin"]
    assert with_shared.prefill_tokens == 2 * 1000 + 6 * 500


def test_a_small_cache_forgets_the_ends_first() -> None:
    everything = simulate(Workload(users=8, replicas=1))["cache_aware"].prefill_tokens
    nothing = simulate(Workload(users=8, replicas=1, cache_tokens=0))["cache_aware"]
    some = simulate(Workload(users=8, replicas=1, cache_tokens=5 * 700))["cache_aware"].prefill_tokens
    assert nothing.hit_rate == 0.0
    assert everything < some <= nothing.prefill_tokens


def test_under_load_a_busy_hit_is_left_for_an_idle_replica() -> None:
    """With every user behind one shared beginning, sending all to the one warm replica would make them wait."""
    work = Workload(users=40, turns=1, replicas=4, shared_tokens=200, start_tokens=800, load=0.9)
    results = simulate(work)
    assert results["cache_aware"].ttft_mean_s <= results["least_loaded"].ttft_mean_s * 1.05
    assert results["cache_aware"].prefill_tokens <= results["round_robin"].prefill_tokens


def test_the_same_seed_gives_the_same_figures() -> None:
    work = Workload(load=0.7, users=20, seed=3)
    assert simulate(work) == simulate(work)
    assert simulate(work) != simulate(Workload(load=0.7, users=20, seed=4))


@pytest.mark.parametrize(
    "bad", [{"users": 0}, {"replicas": 0}, {"load": -1.0}, {"prefill_rate": 0.0}, {"turn_tokens": -1}]
)
def test_absurd_workloads_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(LongctxError, match=next(iter(bad))):
        Workload(**bad)  # type: ignore[arg-type]


def test_the_command_prints_json_and_sweeps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route-sim", "--users", "4", "--turns", "4", "--replicas", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["policies"]) == set(POLICIES)
    assert report["policies"]["cache_aware"]["prefill_tokens"] == 4_400
    assert main(["route-sim", "--replicas", "1,2,4", "--json"]) == 0
    assert [cell["config"]["replicas"] for cell in json.loads(capsys.readouterr().out)["sweep"]] == [1, 2, 4]
    assert main(["route-sim", "--replicas", "none"]) == 2


def test_a_sweep_is_drawn_into_a_new_file(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra `evals` draws pictures")
    out = tmp_path / "sweep.png"
    assert main(["route-sim", "--replicas", "1,2,4", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert main(["route-sim", "--replicas", "1,2,4", "--out", str(out)]) == 2
    assert "not overwritten" in capsys.readouterr().err
