"""Statistics over seeds, against scipy and brute force."""

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from loopscope.report.seeds import contrast, correct, spread_of
from loopscope.runs import RunRecord
from loopscope.seed_groups import groups_of
from scipy import stats

GENERATOR = np.random.default_rng(7)
SAMPLES = [GENERATOR.normal(scale=10.0**scale, size=(2, size)) for size in (2, 3, 5, 30) for scale in (-8, 0, 6)]


def by_seed(values, first: int = 0) -> dict[int, float]:
    return dict(enumerate(map(float, values), first))


@pytest.mark.parametrize("pair", SAMPLES)
def test_spreads_match_scipy(pair) -> None:
    spread = spread_of(list(map(float, pair[0])))
    low, high = stats.t.interval(0.95, len(pair[0]) - 1, pair[0].mean(), stats.sem(pair[0]))
    values = [spread[name] for name in ("mean", "deviation", "low", "high")]
    assert values == pytest.approx([pair[0].mean(), pair[0].std(ddof=1), low, high], rel=1e-9)
    assert (spread["count"], spread["remark"]) == (len(pair[0]), "")


def assert_same_test(result: dict, expected) -> None:
    interval = expected.confidence_interval(0.95)
    names = ("t", "p", "degrees_of_freedom", "low", "high")
    numbers = [expected.statistic, expected.pvalue, expected.df, interval.low, interval.high]
    assert [result[name] for name in names] == pytest.approx(numbers, rel=1e-7)


@pytest.mark.parametrize("pair", SAMPLES)
def test_common_seeds_are_paired(pair) -> None:
    result = contrast(by_seed(pair[0]), by_seed(pair[1]))
    assert (result["test"], result["seeds"]) == ("paired t", f"{len(pair[0])} of {len(pair[0])}")
    assert result["difference"] == pytest.approx((pair[0] - pair[1]).mean())
    assert_same_test(result, stats.ttest_rel(*pair))


@pytest.mark.parametrize("pair", SAMPLES)
def test_other_seeds_are_compared_by_welch(pair) -> None:
    result = contrast(by_seed(pair[0]), by_seed(pair[1][:-1] if len(pair[1]) > 2 else pair[1], 100))
    assert result["test"] == "Welch t"
    assert_same_test(result, stats.ttest_ind(pair[0], pair[1][:-1] if len(pair[1]) > 2 else pair[1], equal_var=False))


def test_missing_and_nonfinite_values_are_counted() -> None:
    """Statistics omit them, and the paired test matches scipy on the others."""
    values = {0: 1.0, 1: 2.0, 2: math.nan, 3: None, 4: 4.0, 5: 1e200}
    spread = spread_of(list(values.values()))
    assert (spread["count"], spread["remark"]) == (3, "1 missing, 2 not finite")
    assert spread["mean"] == pytest.approx(7 / 3)
    result = contrast(values, {0: 3.0, 1: 2.5, 2: math.inf, 4: 1.0})
    assert (result["test"], result["seeds"]) == ("paired t", "3 of 6")
    assert_same_test(result, stats.ttest_rel([1, 2, 4], [3, 2.5, 1]))


@pytest.mark.parametrize("first", [1, 3, 4, 5])
def test_partly_common_seeds_use_all_runs(first) -> None:
    """Five runs each are not reduced to their common seeds, which could be two."""
    a, b = GENERATOR.normal(0, 1, 5), GENERATOR.normal(3, 1, 5)
    result = contrast(by_seed(a), by_seed(b, first))
    assert (result["test"], result["seeds"]) == ("Welch t", "5 of 5, 5 of 5")
    assert_same_test(result, stats.ttest_ind(a, b, equal_var=False))
    result = contrast(by_seed(a), {**by_seed(b), 2: math.nan})
    assert_same_test(result, stats.ttest_ind(a, np.delete(b, 2), equal_var=False))


@pytest.mark.parametrize(("sigma", "low", "high"), [(0.0, 0.94, 0.96), (0.5, 0.91, 0.93), (1.0, 0.81, 0.85)])
def test_interval_of_the_mean_covers_as_documented(sigma, low, high) -> None:
    """Over five seeds: 95 % for normal values, and less for skewed ones, as the page states."""
    draws = np.random.default_rng(3).normal(size=(4000, 5))
    values, mean = (np.exp(sigma * draws), math.exp(sigma**2 / 2)) if sigma else (draws, 0.0)
    spreads = [spread_of(row) for row in values.tolist()]
    assert low <= np.mean([spread["low"] <= mean <= spread["high"] for spread in spreads]) <= high


@pytest.mark.parametrize(
    ("a", "b", "remark"),
    [
        ([0.3, 0.4, 0.5], [0.2, 0.3, 0.4], "no spread"),
        ([1.0, 1.0], [1.0, 1.0], "no spread"),
        ([0.0, 0.0], [0.0, 0.0], "no spread"),
        ([1.0], [2.0], "too few seeds"),
        ([1.0, 2.0], [2.0], "too few seeds"),
        ([math.nan, math.inf], [None, None], "too few seeds"),
    ],
)
def test_constant_values_give_no_test(a, b, remark: str) -> None:
    result = contrast(dict(enumerate(a)), dict(enumerate(b)))
    assert (result["p"], result["test"], result["remark"]) == (None, None, remark)
    alone = spread_of(a[:1])
    assert (alone["deviation"], alone["low"], alone["high"]) == (None, None, None)


@pytest.mark.parametrize("order", list(permutations([0.01, 0.04, 0.03, 0.005])))
def test_p_values_match_brute_force_holm(order) -> None:
    """Holm's p is the smallest level at which the step-down procedure rejects, result by search over levels."""
    tests = [{"p": p, "holm": None} for p in order] + [{"p": None, "holm": None}]
    correct(tests)

    def rejected(level: float) -> set[float]:
        ascending = sorted(order)
        kept = next((i for i, p in enumerate(ascending) if p > level / (len(order) - i)), len(order))
        return set(ascending[:kept])

    levels = np.linspace(0, 1, 2001)
    for test in tests[:-1]:
        least = next(level for level in levels if test["p"] in rejected(level + 1e-9))
        assert test["holm"] == pytest.approx(least, abs=1e-3)
    assert tests[-1]["holm"] is None


def grouped(*records: dict[str, Any]) -> list[str]:
    runs = {}
    for number, fields in enumerate(records):
        record = {"strategy": "a", "experiment": "exp", "config": {}} | fields
        runs[str(number)] = RunRecord(**record)
    return [*groups_of(runs).values()]


def test_runs_differing_only_by_seed_form_groups() -> None:
    """Group names have the differing options and treatments and stay distinct."""
    names = grouped(
        {"config": {"seed": 0, "lr": 0.1, "output_dir": "x"}},
        {"config": {"seed": 1, "lr": 0.1, "output_dir": "y"}, "hooks": {"norms": {}}},
        {"config": {"seed": 0, "lr": 0.2}},
        {"strategy": "b"},
        {"strategy": "b", "hooks": {"clip": {"max_norm": 1}}, "treatments": {"clip": ["gradients"]}},
        {"strategy": "c", "config": {"seed": [{}]}},
    )
    assert [*names[:4], names[5]] == ["a, lr 0.1", "a, lr 0.1", "a, lr 0.2", "b, treatments {}", "c"]
    assert names[4].startswith("b, treatments {'clip'")
    assert len({*grouped(*({"config": {f"option_{n}": 1 for n in range(count)}} for count in range(9)))}) == 9
    assert len({*grouped(*({"config": {"text": "x" * 50 + end}} for end in "ab"))}) == 2
