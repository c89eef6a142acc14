"""Departures compared with a definition by loops, on planted jumps, and on noise."""

import math
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.laboratory.questions.departures import (
    HISTORY,
    MOST_TESTED_STEPS,
    SMALLEST_SPREAD,
    WINDOW,
    Deviation,
    departures,
    scores,
)
from loopscope.laboratory.usual_values import without_trend

LENGTH = HISTORY + WINDOW + MOST_TESTED_STEPS


def first_departure(history: dict[str, dict[int, float]], step: int) -> tuple[Deviation | None, str]:
    found, reason = departures(history, step)
    return (found or [None])[0], reason


def noise(seed: int, quantities: int = 30, heavy: bool = False) -> dict[str, dict[int, float]]:
    """Return losses and gradient norms that scatter about a falling level."""
    generator = np.random.default_rng(seed)
    draws = generator.standard_t(3, (quantities, LENGTH)) if heavy else generator.normal(size=(quantities, LENGTH))
    values = np.exp(0.2 * draws - np.linspace(0, 1, LENGTH))
    names = ["loss", *(f"gradient/layer.{index}" for index in range(quantities - 1))]
    return {name: {step: float(x) for step, x in enumerate(row, 1)} for name, row in zip(names, values, strict=True)}


def level_without_trend(values: list[float]) -> list[float]:
    """Remove the slope between the medians of the outer thirds, by the definition."""
    third = len(values) // 3
    ends = [[x for x in part if math.isfinite(x)] for part in (values[:third], values[-third:])]
    if any(2 * len(part) <= third for part in ends):
        return values
    slope = (median(ends[1]) - median(ends[0])) / (len(values) - third)
    return [value + slope * (len(values) - place) for place, value in enumerate(values)]


@pytest.mark.longer
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(st.floats(-5, 5), st.just(math.inf), st.just(math.nan)), min_size=WINDOW + 1, max_size=WINDOW + 9
    ),
    st.booleans(),
)
def test_scores_are_distances_from_the_median_in_spreads(values, both):
    found = scores(np.array([values]), both=np.array([both]))[0]
    assert len(found) == len(values) - WINDOW
    for place, z in enumerate(found, WINDOW):
        levels = level_without_trend(values[place - WINDOW : place])
        before = [value for value in levels if math.isfinite(value)]
        now = values[place]
        if not before or math.isnan(now):
            expected = 0.0
        elif math.isinf(now):
            expected = math.inf
        else:
            middle = median(before)
            spread = 1.4826 * median(abs(value - middle) for value in before)
            expected = (now - middle) / max(spread, SMALLEST_SPREAD)
            expected = abs(expected) if both else expected
        assert z == pytest.approx(expected)


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.statistical
def test_quiet_runs_rarely_show_departures(heavy):
    """At most 9 of 60 runs of plain noise report a departure, which is about 5% with a margin."""
    found = sum(first_departure(noise(seed, heavy=heavy), LENGTH)[0] is not None for seed in range(60))
    assert found <= 9  # P(more) is below 0.1 % at a rate of 5 %


@pytest.mark.parametrize("name", ["loss", "gradient/layer.7"])
@pytest.mark.parametrize("late", range(MOST_TESTED_STEPS - 1))
def test_planted_jump_is_found(name, late):
    """The departure has the step, name and value of the planted jump and p of at most 0.05."""
    history = noise(1)
    step = LENGTH - late
    history[name][step] *= 50
    found, _ = first_departure(history, LENGTH)
    assert (found.step, f"{found.quantity}/{found.name}".rstrip("/")) == (step, name)
    assert found.value == history[name][step]
    assert found.comparisons == len(history)
    assert found.p <= 0.05


@pytest.mark.parametrize("value", [math.inf, 1e300])
def test_infinite_value_is_a_departure(value):
    history = noise(2)
    history["output/first"] = dict(history["gradient/layer.1"])
    history["output/second"] = dict(history["gradient/layer.2"])
    for name in ("gradient/layer.3", "output/second", "output/first"):
        history[name][LENGTH - 1] = value
    found, _ = first_departure(history, LENGTH)
    assert (found.step, found.quantity, found.name) == (LENGTH - 1, "output", "first")
    assert {"output/second", "gradient/layer.3"} <= {*found.others}


def test_falling_second_moment_is_a_departure():
    """A second moment that drops is reported, while a gradient that drops is not."""
    history = noise(3)
    history["gradient/layer.1"][LENGTH] *= 1e-4
    assert first_departure(history, LENGTH)[0] is None
    history["state/exp_avg_sq/w"] = {step: 1e-6 * 0.999**step for step in range(1, LENGTH + 1)}
    history["state/exp_avg_sq/w"][LENGTH] *= 1e-3
    assert first_departure(history, LENGTH)[0].quantity == "state"


def test_lone_effect_yields_to_next_departure():
    """A departure of the effect alone counts, unless other quantities depart in the next step."""
    history = noise(4)
    history["effect"] = {step: 0.01 * math.sin(step) for step in range(1, LENGTH + 1)}
    history["effect"][LENGTH - 2] = 50.0
    assert first_departure(history, LENGTH)[0].step == LENGTH - 2
    history["output/first"] = dict(history["gradient/layer.1"])
    history["output/first"][LENGTH - 1] *= 1e3
    assert first_departure(history, LENGTH)[0].step == LENGTH - 1


def test_short_history_is_reported():
    """The reason gives the number of recorded steps and the number needed."""
    history = {name: {step: series[step] for step in range(1, 36)} for name, series in noise(5).items()}
    found, why = first_departure(history, 35)
    assert found is None
    assert why == "Step 35 has only 34 recorded steps before it; the test needs at least 35."
    assert first_departure(history, 99)[1].startswith("Step 99 has only 0 recorded steps before it")


@pytest.mark.parametrize("step", [41, 50, 75, 120])
@pytest.mark.parametrize("name", ["loss", "gradient/layer.7"])
def test_jumps_are_found_while_levels_fall(name, step):
    """A steep fall hides a jump to an earlier level from the median, but not from the trend."""
    history = noise(8)
    for series in history.values():
        for at in series:
            series[at] *= 30 * math.exp(-at / 25)
    history[name][step] *= 8
    found, reason = first_departure(history, step)
    assert found is not None, reason
    assert (found.step, f"{found.quantity}/{found.name}".rstrip("/")) == (step, name)


@pytest.mark.parametrize("slope", [-2.0, 0.0, 0.5])
def test_trend_is_removed_around_next_value(slope):
    values = slope * np.arange(32.0)
    np.testing.assert_allclose(without_trend(values), slope * 32)
    values[[3, 30]] = np.nan, np.inf
    np.testing.assert_allclose(without_trend(values)[[0, 31]], slope * 32, rtol=0.05)


def test_short_or_broken_series_keep_their_values():
    assert list(without_trend(np.arange(8.0))) == list(range(8))
    broken = np.where(np.arange(30) > 20, np.inf, np.arange(30.0))
    np.testing.assert_array_equal(without_trend(broken), broken)
