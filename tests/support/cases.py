"""Selection of the rows of a matrix that quick runs test; the other rows carry the marker ``slow``."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any
from zlib import crc32

import pytest

from tests.support import CASES, LOOPS, MODELS, OPTIMIZERS, Case


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Choose few rows of the product of axes that together contain every pair of values of two axes."""
    contents = {row: pairs(row) for row in product(*axes)}
    missing = set().union(*contents.values())
    chosen = []
    while missing:
        chosen.append(max(contents, key=lambda row: len(contents[row] & missing)))
        missing -= contents[chosen[-1]]
    return chosen


def pairs(row: tuple[Any, ...]) -> set[Any]:
    """Return every pair of values of a row with their positions; for a row of one value, that value."""
    return set(combinations(enumerate(row), min(2, len(row))))


def each_value(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Choose fewer rows of ``pairwise`` that together contain every value of each axis.

    >>> each_value("ab", [1, 2])
    [('a', 1), ('a', 2), ('b', 1)]
    """
    chosen: list[tuple[Any, ...]] = []
    seen: set[Any] = set()
    for row in pairwise(*axes):
        if not seen.issuperset(enumerate(row)):
            chosen.append(row)
            seen.update(enumerate(row))
    return chosen


def slow_unless(condition: bool) -> list[pytest.MarkDecorator]:
    """Return the marks of a row: ``slow`` unless the condition holds."""
    return [] if condition else [pytest.mark.slow]


def some_of(values: Iterable[Any], every: int = 2) -> list[Any]:
    """Return a parameter for each value; without ``slow``, tests use only the first of each ``every`` values."""
    rows = enumerate(values)
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=slow_unless(index % every == 0))
        for index, row in rows
    ]


def matrix(names: str, *axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize over the product of axes with hashable values; without ``slow``, over rows with every value.

    >>> [row.values for row in matrix("loop, every", ["epoch", "step"], [1, 2]).args[1]]
    [('epoch', 1), ('epoch', 2), ('step', 1), ('step', 2)]
    """
    axes = tuple(map(list, axes))
    chosen = each_value(*axes)
    rows = [pytest.param(*row, id="-".join(map(str, row)), marks=slow_unless(row in chosen)) for row in product(*axes)]
    return pytest.mark.parametrize(names, rows)


PAIRS = [Case(*row) for row in pairwise(MODELS, OPTIMIZERS, LOOPS)]
every_pair = pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=slow_unless(case in PAIRS)) for case in CASES]
)


def turn(name: str) -> int:
    """Return a number that depends only on the name."""
    return crc32(name.encode())


def always_on(name: str) -> list[Case]:
    """Choose the cases in which a hook is tested alone without ``slow``: each model, in alternating loops.

    The pairing of loops and optimizers with models differs between hooks, so that all hooks together cover every case.
    """
    optimizers, number = list(OPTIMIZERS), turn(name)
    return [
        Case(model, optimizers[(number + row) % len(optimizers)], LOOPS[(number // len(optimizers) + row) % len(LOOPS)])
        for row, model in enumerate(MODELS)
    ]


FEW_PASSES = {
    "hessian": {"burst_length": 2},
    "hypothesis_test": {"changes": "half_rate,fresh_state", "steps": 2},
    "lr_probe": {"steps": 6, "smoothing": 0.5},
    "matrix_updates": {"interval": 2},
    "optimizer_health": {"interval": 2},
    "parameter_norms": {"interval": 2},
    "sharpness": {"iterations": 3, "k": 1, "probes": 2, "density_probes": 1, "batches": 2, "critical_passes": 3},
    "what_if": {"fresh": 3, "follow": 1},
}
"""Options with which expensive hooks measure in fewer passes, and others several times in a short run."""
HEADS_AS_ROUTERS: dict[str, dict[str, Any]] = {"moe_router": {"routers": "*[4r]", "top_k": 2}}
"""Options with which hooks measure models of the contract tests that have no subject for them."""


def every_hook_and_case(names: Sequence[str], *, quick: int = len(MODELS)) -> pytest.MarkDecorator:
    """Parametrize over hooks and cases; without ``slow``, over its first ``quick`` cases of ``always_on``."""
    rows = [
        pytest.param(name, case, id=f"{name}-{case}", marks=slow_unless(case in always_on(name)[:quick]))
        for name in names
        for case in CASES
    ]
    return pytest.mark.parametrize(("name", "case"), rows)
