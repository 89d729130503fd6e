"""The online fit: it converges, forgets, shrugs off outliers and never predicts a negative time."""

import json
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longctx.fit import OnlineFit, _non_negative

TRUE = (0.01, 1e-3, 1e-7)


def features(start: int, n: int) -> tuple[float, float, float]:
    return 1.0, float(n), n * (start + n / 2)


def seconds(x: tuple[float, ...], scale: float = 1.0) -> float:
    return scale * sum(a * b for a, b in zip(TRUE, x, strict=True))


def warmed(steps: int = 60, noise: float = 0.03) -> OnlineFit:
    draw, fit = random.Random(5), OnlineFit((0.002, 4e-4, 5e-8))
    for step in range(steps):
        x = features(512 * step, draw.choice([64, 256, 512]))
        fit.observe(x, seconds(x) * draw.uniform(1 - noise, 1 + noise))
    return fit


def test_it_finds_the_machine_from_noisy_steps() -> None:
    fit = warmed()
    for x in (features(0, 512), features(30_000, 512), features(100_000, 2048)):
        assert fit.predict(x) == pytest.approx(seconds(x), rel=0.08)
    assert fit.relative_error < 0.1


def test_one_step_corrects_all_coefficients_alike() -> None:
    fit = OnlineFit(tuple(v / 3 for v in TRUE))
    x = features(0, 512)
    fit.observe(x, seconds(x))
    far = features(200_000, 512)
    assert fit.predict(far) == pytest.approx(seconds(far), rel=0.25)


def test_an_outlier_is_not_the_machine() -> None:
    fit, x = warmed(), features(20_000, 512)
    before = fit.predict(x)
    fit.observe(x, 50 * seconds(x))
    assert fit.predict(x) < 1.1 * before
    fit.observe(x, seconds(x) / 50)
    assert fit.predict(x) > before / 1.1


def test_a_first_step_that_compiles_kernels_is_forgotten_soon() -> None:
    fit, x = OnlineFit(TRUE), features(0, 512)
    fit.observe(x, 30 * seconds(x))
    for _ in range(8):
        fit.observe(x, seconds(x))
    assert fit.predict(x) == pytest.approx(seconds(x), rel=0.15)


def test_many_small_steps_do_not_make_it_forget_what_large_ones_cost() -> None:
    fit = warmed()
    for step in range(500):
        x = features(20 * step, 16)
        fit.observe(x, seconds(x))
    assert fit.predict(features(8000, 512)) == pytest.approx(seconds(features(8000, 512)), rel=0.1)


def test_it_follows_a_machine_that_became_slower() -> None:
    fit = warmed()
    for step in range(120):
        x = features(512 * step, 512)
        fit.observe(x, seconds(x, 2.0))
    assert fit.predict(features(20_000, 512)) == pytest.approx(seconds(features(20_000, 512), 2.0), rel=0.12)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_measurement_that_is_none_is_ignored(bad: float) -> None:
    fit = warmed(5)
    before = fit.to_json()
    fit.observe(features(0, 512), bad)
    assert fit.to_json() == before


@settings(max_examples=150, deadline=None)
@example([(10**6, 4096, 1e4), (10**6, 4096, 1e-6), (0, 2, 1e4)] * 10)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(2, 4096), st.floats(1e-6, 1e4)), min_size=1, max_size=30))
def test_no_history_makes_a_time_negative_or_infinite(steps: list[tuple[int, int, float]]) -> None:
    fit = OnlineFit((0.002, 4e-4, 5e-8))
    for start, n, measured in steps:
        fit.observe(features(start, n), measured)
    assert (fit.coefficients >= 0).all()
    assert 0 <= fit.predict(features(10**6, 4096)) < float("inf")
    assert fit.relative_error >= 0.05


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=9, max_size=9), st.lists(st.floats(-3, 3), min_size=3, max_size=3))
def test_the_constrained_minimum_is_one(flat: list[float], moment: list[float]) -> None:
    root = np.array(flat).reshape(3, 3)
    gram, target = root @ root.T + 0.1 * np.eye(3), np.array(moment)
    best = _non_negative(gram, target)
    gradient = gram @ best - target
    assert (best >= 0).all()
    assert (gradient >= -1e-8).all(), "no coefficient would help by growing"
    assert np.abs(gradient * best).max() < 1e-7, "none that is free would help by moving"


def test_what_is_written_is_read_back() -> None:
    fit = warmed()
    again = OnlineFit.from_json(json.loads(json.dumps(fit.to_json())))
    x = features(1000, 300)
    assert again.predict(x) == fit.predict(x)
    fit.observe(x, 2.0)
    again.observe(x, 2.0)
    assert again.to_json() == fit.to_json()


@pytest.mark.parametrize(
    "change",
    [{"guess": [1, 0, 1]}, {"gram": [[1]]}, {"moment": [1, 2, float("nan")]}, {"spread": "x"}, {"guess": [1, 2]}],
)
def test_a_file_that_was_not_written_here_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        OnlineFit.from_json({**warmed(5).to_json(), **change})
