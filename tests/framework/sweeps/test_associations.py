"""Settings with which findings come: Fisher's test by brute force, Holm's correction, and the conditions."""

from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopscope.sweeps import associations
from loopscope.sweeps.fisher import SIGNIFICANT, fisher
from scipy.stats import fisher_exact

SWEEP = [{"lr": lr, "seed": seed, "width": 64} for lr in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2) for seed in range(20)]
"""Five learning rates with twenty seeds each."""


def by_enumeration(both: int, first: int, second: int, total: int) -> float:
    """Return the share of all ways to choose the affected runs that are at most as probable as the observed one."""
    counts = [len({*chosen} & {*range(second)}) for chosen in combinations(range(total), first)]
    return sum(counts.count(count) <= counts.count(both) for count in counts) / len(counts)


@given(st.data())
def test_fisher_equals_the_enumeration_of_all_tables(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 9))
    first, second = data.draw(st.integers(0, total)), data.draw(st.integers(0, total))
    both = data.draw(st.integers(max(0, first + second - total), min(first, second)))
    assert fisher(both, first, second, total) == pytest.approx(by_enumeration(both, first, second, total), rel=1e-12)


@pytest.mark.parametrize("table", [(38, 40, 40, 100), (3, 500, 20, 1000), (0, 7, 9, 40)])
def test_fisher_equals_scipy(table: tuple[int, int, int, int]) -> None:
    both, first, second, total = table
    rows = [[both, second - both], [first - both, total - first - second + both]]
    assert fisher(*table) == pytest.approx(fisher_exact(rows).pvalue, rel=1e-7)


def test_thresholds_of_numbers_are_found() -> None:
    """38 of 40 runs with a high learning rate, and 2 of 60 others, have the finding."""
    affected = [*range(62, 100), 0, 25]
    found = associations({"nonfinite": affected}, SWEEP)["nonfinite"]
    assert [item.condition for item in found] == ["lr >= 0.003"]
    assert (found[0].runs, found[0].others) == ((40, 38), (60, 2))
    # 4 thresholds and 20 seeds are tested; the width does not vary.
    assert found[0].p == fisher(38, 40, 40, 100)
    assert found[0].holm == pytest.approx(24 * found[0].p)
    assert found[0].holm < 1e-18


def test_the_frequent_side_has_the_condition() -> None:
    runs = [{"lr": lr, "amp": amp} for lr in (1, 2, 3) for amp in ("bf16", "none") for _ in range(20)]
    found = associations(
        {"slow": [i for i, run in enumerate(runs) if run["lr"] < 2], "x": [*range(20), *range(40, 60), 80, 81]}, runs
    )
    assert [item.condition for item in found["slow"]] == ["lr <= 1"]
    assert "amp = bf16" in [item.condition for item in found["x"]]


def test_settings_that_divide_alike_are_one_test() -> None:
    runs = [{"lr": lr, "learning_rate": lr, "seed": index % 2} for index, lr in enumerate([0.1, 0.2] * 10)]
    (found,) = associations({"a": [*range(1, 20, 2)]}, runs)["a"]
    assert (found.condition, found.same_as) == ("lr = 0.2", ["learning_rate", "seed"])
    assert found.holm == found.p == pytest.approx(2 / comb(20, 10))


def test_missing_and_mixed_values_are_names() -> None:
    runs = [{"clip": value} if value else {} for value in ["0.5", 1.0, None] * 10]
    (found,) = associations({"a": [*range(2, 30, 3)]}, runs)["a"]
    assert found.condition == "clip = None"


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_constant_settings_and_findings_have_no_association(affected: list[bool]) -> None:
    """Nothing is reported for settings that do not vary, nor for a finding of all runs."""
    runs = [{"lr": 0.1} for _ in affected]
    assert associations({"a": [i for i, item in enumerate(affected) if item]}, runs) == {"a": []}
    assert associations({"a": [*range(len(runs))]}, [{"seed": i} for i in range(len(runs))]) == {"a": []}


def test_corrected_values_are_holms() -> None:
    """By brute force: the sorted values times the number of tests that are left, never decreasing."""
    runs = [{"a": i % 2, "b": i // 10 % 2, "c": i // 20} for i in range(40)]
    findings = {"x": [i for i in range(40) if i % 2 or i == 0], "y": [*range(20, 38)]}
    groups = [{i for i in range(40) if runs[i][name]} for name in "abc"]
    values = sorted(
        fisher(len(group & {*affected}), len(affected), len(group), 40)
        for group in groups
        for affected in findings.values()
    )
    corrected = [max(p * (len(values) - i) for i, p in enumerate(values[: n + 1])) for n in range(len(values))]
    found = sorted(item.holm for items in associations(findings, runs).values() for item in items)
    assert found == pytest.approx([value for value in corrected if value < SIGNIFICANT])
