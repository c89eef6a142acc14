"""Verdicts from branches: each cause by its branch, and no cause without such a branch."""

import math

import numpy as np
import pytest
from loopscope.laboratory.usual_values import is_beyond
from loopscope.laboratory.verdict import harms, is_damaged_before, verdict

GENERATOR = np.random.default_rng(0)
USUAL = {"loss": [*GENERATOR.normal(1, 0.1, 200)], "effect": [*GENERATOR.normal(0, 0.01, 200)], "size": [1.0] * 200}
FRESH = [*GENERATOR.normal(0, 0.01, 39)]
LOW = [0.0]


def judged(effects=(), sizes=None, loss=1.0, fresh=(), low_precision=0, **more):
    """Return the verdict on a step whose branches have the effect 2, except those in ``effects``."""
    names = ("half_rate", "fresh_state", "float32", "float64", "clipped", "without_rows")
    effect = {"run": 2.0, "as_it_was": [2.0] * 5, "fresh": fresh or [2.0] * 39, **{name: [2.0] for name in names}}
    values = {"effect": effect | dict(effects), "loss": {"as_it_was": [loss], "fresh": [1 + item for item in FRESH]}}
    values |= {"low_precision": low_precision} | ({"size": sizes} if sizes else {}) | more
    run_values = {"loss": loss} | ({"size": sizes["as_it_was"][0]} if sizes else {})
    return verdict(values, harms(values, run_values, USUAL, "output of fc"), ["row 7"])


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ({"fresh": FRESH}, "data"),
        ({"fresh": FRESH, "effects": {"clipped": LOW}}, "data"),
        ({"effects": {"half_rate": [0.05]}}, "step size"),
        ({"effects": {"half_rate": [0.05], "usual_rate": LOW, "fresh_state": LOW}}, "step size"),
        ({"effects": {"half_rate": [0.05], "fresh_state": [0.01]}}, "optimizer state"),
        ({"effects": {"clipped": LOW}}, "step size"),
        ({"effects": {"float32": LOW}, "low_precision": 9}, "precision"),
        ({"effects": {"float32": LOW}}, None),
        ({"effects": {"run": math.nan, "as_it_was": [math.nan] * 5, "float64": LOW}}, "precision"),
        ({"effects": {"element_restored": 0.0}, "element": {"fc.weight": [3, 0.1, 99.0]}}, "fault"),
        ({"fresh": [1.0] * 39, "effects": {"fresh_state": LOW}}, "optimizer state"),  # half as bad is as bad
        ({"effects": {"zero_rate": [2.0], "fresh_state": LOW}}, None),  # the step writes to weights at any rate
        ({"fresh": FRESH, "effects": {"zero_rate": [1.9]}}, None),
        ({"effects": {"zero_rate": LOW, "fresh_state": LOW}}, "optimizer state"),
        ({"effects": {"zero_rate": [2.0]}, "loss": 9.0}, None),
        ({"effects": {"zero_rate": [math.nan], "float64": LOW}}, "precision"),
        ({"effects": {"as_it_was": [0.0, 0.1, 0.0, 0.0, -0.1]}}, "chance"),
        ({"effects": {"as_it_was": [0.0] * 5}}, None),
        ({}, None),
        ({"effects": {"run": 0.0}}, None),
        ({"effects": {"run": 0.0}, "loss": 9.0}, "data"),
        ({"effects": {"run": 0.0}, "sizes": {"as_it_was": [9.0], "fresh": [1.0] * 39, "without_rows": [1.0]}}, "data"),
        ({"effects": {"run": 0.0}, "sizes": {"as_it_was": [9.0], "fresh": [9.0] * 39}}, None),
    ],
)
def test_cause_is_the_branch_that_removes_harm(case, cause):
    """Without such a branch the cause is None, and the sentence reports no cause."""
    result = judged(**case)
    assert result.cause == cause
    assert result.sentence.startswith("Inconclusive:" if cause is None else cause.capitalize())


NOT_FINITE = (math.nan, math.inf, -math.inf)
BAD_STEP = ("run", "as_it_was", "half_rate", "zero_rate", "clipped", "fresh_state", "float32", "float64")


def not_finite_step(outcome: float, repaired: dict[str, float]) -> dict:
    """Return the effects of branches that are not finite, except those that are repaired."""
    return {"fresh": [outcome] * 39, "without_rows": [outcome]} | dict.fromkeys(BAD_STEP, [outcome] * 5) | repaired


@pytest.mark.parametrize("outcome", NOT_FINITE)
@pytest.mark.parametrize(
    ("repaired", "cause"),
    [
        ({"fresh": FRESH, "without_rows": [0.0]}, "data"),
        ({"fresh": [*FRESH[1:], math.nan], "without_rows": [0.0]}, "data"),  # the row returns in the next epoch
        ({"fresh_state": LOW}, "optimizer state"),
        ({"half_rate": LOW, "zero_rate": LOW}, "step size"),
        ({"float64": LOW}, "precision"),
        ({"as_it_was": [math.nan, 0.0, 0.0, 0.0, 0.0]}, "chance"),
        ({"zero_rate": [1.0]}, None),
        ({}, None),
    ],
)
def test_results_that_are_not_finite_are_one_outcome(outcome, repaired, cause):
    """They neither count as evidence against an update, as 0 · NaN is NaN, nor hide the branches that are finite."""
    result = judged(effects=not_finite_step(outcome, repaired))
    assert result.cause == cause
    assert "are not finite" in result.sentence
    assert ("without row 7" in result.sentence) == (cause == "data")


def test_bad_fresh_batch_is_no_earlier_damage():
    """A row that is not finite in one fresh batch does not make the state before the step a damaged one."""
    assert not is_damaged_before({"loss": {"fresh": [*[1.0] * 38, math.nan]}}, USUAL)
    assert is_damaged_before({"loss": {"fresh": [math.nan] * 39}}, USUAL)


def test_sentence_has_numbers_and_rows():
    result = judged(fresh=FRESH, effects={"without_rows": [0.05]})
    assert result.sentence.startswith("Data: the losses of the next batches rise by 2 on this batch, ")
    assert result.sentence.endswith("p = 0.025), and 0.05 without row 7.")


def test_outlier_needs_rank_and_distance():
    """A value is beyond the usual ones if it exceeds all of at least 40 by far, or is NaN."""
    usual = [float(value) for value in range(40)]
    assert is_beyond(150.0, usual)
    assert not is_beyond(40.0, usual)  # by rank alone
    assert not is_beyond(150.0, usual[:10])  # too few to tell
    assert is_beyond(math.nan, usual)


FALLING = {
    "exponential": lambda steps: 1.94 + 1.96 * np.exp(-steps / 60),
    "linear": lambda steps: 3.9 - 0.0098 * steps,
    "power": lambda steps: 1.94 + 10 / (1 + steps),
    "flat": lambda steps: np.full(len(steps), 1.94),
}


@pytest.mark.parametrize("count", [40, 90, 200])
@pytest.mark.parametrize("kind", FALLING)
def test_spike_counts_while_loss_falls(kind, count):
    """A loss 8 spreads above fresh batches is harmful, although earlier steps had higher losses."""
    generator = np.random.default_rng(1)
    level = FALLING[kind](np.arange(count + 1.0))
    before = list(level[:-1] + 0.06 * generator.standard_normal(count))
    fresh = list(level[-1] + 0.06 * generator.standard_normal(39))
    run = level[-1] + 0.5
    values = {
        "loss": {"as_it_was": [run] * 5, "fresh": fresh, "without_rows": [level[-1]], "half_rate": [run]},
        "effect": {"run": 0.0, "as_it_was": [0.0] * 5, "fresh": FRESH},
        "low_precision": 0,
        "element": {},
    }
    usual = {"loss": before, "effect": USUAL["effect"]}
    bad = harms(values, {"loss": run, "effect": 0.0}, usual)
    assert verdict(values, bad, ["row 1"]).cause == "data"
    assert not is_damaged_before(values, usual)
    assert not harms(values, {"loss": level[-1], "effect": 0.0}, usual)
    damaged = {**values, "loss": {"fresh": [item + 1 for item in fresh]}}
    assert is_damaged_before(damaged, usual)
