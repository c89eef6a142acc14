"""The members of a hook's families that it reports, with whole families on the host only where this is needed."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from .flat_vectors import stacked
from .series_budget import FamilyFile, SeriesBudget

Families = Mapping[str, Mapping[str, Tensor]]
"""Zero-dimensional tensors by member, by family."""
TOTALS = "totals"


def on_host(families: Families) -> dict[str, dict[str, float | int]]:
    """Return all values as numbers, after one transfer.

    >>> on_host({"norm": {"a": torch.tensor(1.5), "b": torch.tensor(2)}, "rank": {}})
    {'norm': {'a': 1.5, 'b': 2}, 'rank': {}}
    """
    tensors = [value for members in families.values() for value in members.values()]
    numbers = stacked([value.to(torch.float64) for value in tensors]).tolist() if tensors else []
    typed = iter([n if value.is_floating_point() else int(n) for n, value in zip(numbers, tensors, strict=True)])
    return {family: {name: next(typed) for name in members} for family, members in families.items()}


def reported_series(
    families: Families,
    budget: SeriesBudget,
    totals: Mapping[str, Tensor] = MappingProxyType({}),
    *,
    step: int,
    file: FamilyFile | None = None,
    chosen_with: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Tensor | float]:
    """Return the totals, and the members within the budget as ``family/member``; append all members to a file.

    Without a file, and if all families fit the budget, the result has the given tensors. Otherwise it has numbers, so
    that one transfer to the host serves the choice, the file and the report.

    Args:
        families: the values of all members.
        budget: the number of members to report.
        totals: values of the whole model.
        step: the step of the values.
        file: the file for whole families.
        chosen_with: by family, another one whose chosen members are reported, too, in place of its own extremes.
    """
    largest = max(map(len, families.values()), default=0)
    if file is None and largest <= budget.top + budget.bottom:
        members = {f"{family}/{name}": value for family, values in families.items() for name, value in values.items()}
        return {**totals, **members}
    by_family = on_host({**families, TOTALS: totals})
    series: dict[str, Tensor | float] = {**by_family.pop(TOTALS)}
    if file is not None:
        file.append(step, by_family)
    for family, values in by_family.items():
        chosen = budget.choose(by_family[chosen_with.get(family, family)])
        series |= {f"{family}/{name}": values[name] for name in chosen if name in values}
    return series
