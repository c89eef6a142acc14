"""The settings with which a finding comes, over many runs: Fisher's exact test of each value and threshold."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb
from typing import Any

SIGNIFICANT = 0.05
MOST_CONDITIONS = 20
"""Thresholds, or values, of a setting that are tested; of more values, those at equal shares of the runs."""
NAMED = ("seed",)
"""Settings whose numbers are names, which have no order."""


@cache
def fisher(both: int, first: int, second: int, total: int) -> float:
    """Return the two-sided p-value of Fisher's exact test.

    Args:
        both: runs with the finding and the condition.
        first: runs with the finding.
        second: runs with the condition.
        total: all runs.

    >>> round(fisher(3, 4, 4, 8), 4), fisher(2, 2, 4, 4)
    (0.4857, 1.0)
    """
    # P(k) = C(second, k) C(total − second, first − k) / C(total, first); the sum over all k at most as probable as the
    # observed one. Whole numbers make ties exact.
    possible = range(max(0, first + second - total), min(first, second) + 1)
    weights = {k: comb(second, k) * comb(total - second, first - k) for k in possible}
    return sum(weight for weight in weights.values() if weight <= weights[both]) / comb(total, first)


@dataclass(frozen=True)
class Association:
    """A condition on a setting with which a finding comes more often than without it.

    Args:
        setting: the name of the setting.
        condition: the condition in words, such as ``lr >= 0.003``.
        runs: the number of runs that fulfil it, and of those with the finding.
        others: the same for all other runs.
        p: the p-value of Fisher's exact test.
        holm: the p-value after Holm's correction for all tests of the folder.
        same_as: other settings that divide the runs in the same way.
    """

    setting: str
    condition: str
    runs: tuple[int, int]
    others: tuple[int, int]
    p: float
    holm: float
    same_as: Sequence[str] = ()


def associations(
    findings: Mapping[str, Collection[int]], settings: Sequence[Mapping[str, Any]]
) -> dict[str, list[Association]]:
    """Return the significant associations of each finding, the most significant first, one for each setting.

    Args:
        findings: the indices of the runs with each finding.
        settings: the settings of each run.
    """
    total, divisions = len(settings), _divisions(settings)
    tests = sorted(
        (fisher(len(group & set(affected)), len(affected), len(group), total), finding, names[0], group)
        for finding, affected in findings.items()
        for group, names in divisions.items()
    )
    significant: dict[str, list[Association]] = {finding: [] for finding in findings}
    holm = 0.0
    for rank, (p, finding, (setting, inside, outside), group) in enumerate(tests):
        holm = max(holm, min(1.0, p * (len(tests) - rank)))
        if holm >= SIGNIFICANT:
            break
        if setting not in [item.setting for item in significant[finding]]:
            affected = set(findings[finding])
            sides = [(len(group), len(group & affected)), (total - len(group), len(affected - group))]
            is_inside = sides[0][1] * sides[1][0] > sides[1][1] * sides[0][0]  # the finding is more frequent there
            runs, others = sides if is_inside else reversed(sides)
            same = [name for name, *_ in divisions[group] if name != setting]
            condition = inside if is_inside else outside
            significant[finding].append(Association(setting, condition, runs, others, p, holm, same))
    return significant


def _divisions(settings: Sequence[Mapping[str, Any]]) -> dict[frozenset[int], list[tuple[str, str, str]]]:
    """Return the ways in which a setting divides the runs in two: the part with the first run, and what selects it.

    Each selection is the name of a setting, the condition that this part fulfils, and that of the other part.
    """
    divisions: dict[frozenset[int], list[tuple[str, str, str]]] = {}
    for name in dict.fromkeys(name for run in settings for name in run):
        for inside, outside, group in _conditions(name, [run.get(name) for run in settings]):
            if 0 in group:
                divisions.setdefault(group, []).append((name, inside, outside))
            else:
                rest = frozenset(range(len(settings))) - group
                divisions.setdefault(rest, []).append((name, outside, inside))
    return divisions


def _conditions(name: str, values: Sequence[Any]) -> Iterator[tuple[str, str, frozenset[int]]]:
    """Yield conditions on a setting with their opposites, and the runs that fulfil each condition.

    These are thresholds of numbers, and otherwise single values.
    """
    is_number = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    distinct = list(dict.fromkeys(map(repr, values)))
    if is_number and name not in NAMED and len(distinct) > 2:
        ordered = sorted(set(values))
        for index in _spread(len(ordered) - 1):
            low, high = ordered[index : index + 2]
            group = frozenset(run for run, value in enumerate(values) if value >= high)
            yield f"{name} >= {_shown(high)}", f"{name} <= {_shown(low)}", group
        return
    for index in _spread(len(distinct)) if len(distinct) > 2 else range(len(distinct) - 1):
        group = frozenset(run for run, value in enumerate(values) if repr(value) == distinct[index])
        others = [value for run, value in enumerate(values) if run not in group]
        is_pair = len(distinct) == 2
        shown = _shown(values[min(group)])
        yield f"{name} = {shown}", f"{name} = {_shown(others[0])}" if is_pair else f"{name} != {shown}", group


def _spread(count: int) -> list[int]:
    """Return the indices of at most ``MOST_CONDITIONS`` of ``count`` items, at equal distances."""
    if count <= MOST_CONDITIONS:
        return [*range(count)]
    return [index * (count - 1) // (MOST_CONDITIONS - 1) for index in range(MOST_CONDITIONS)]


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
