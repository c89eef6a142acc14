"""Inputs that a cast or a division of whole numbers has destroyed, compared with the data that the script has."""

import sys
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .trial import Trial

MOST_ELEMENTS = 20_000_000
"""Elements of the data that are compared."""
MOST_ENTRIES = 16
"""Entries of a container that are searched for data."""
DEPTH = 4
LEAST_DIVISOR = 100
"""The smallest number that is taken for the range of pixels; a division by a smaller one may put values in bins."""
LEAST_VALUES = 16
"""Different values of the data, of which a few are left."""
FEW = 8


def lost_inputs(trial: Trial) -> str:
    """Return a sentence on an input that has lost what distinguishes the data, or nothing."""
    for index, value in trial.inputs.items():
        name = trial.names.get(index, "") or "an input"
        if value.is_floating_point() and not bool(value.isfinite().all()):
            outputs = trial.evaluate(needs_loss=False, train=False).outputs
            if any(not bool(item.isfinite().all()) for item in outputs):
                return f"{name} has infinite values or NaN, and so have the outputs"
        if value.ndim > 1 and len(value) == trial.rows and len(torch.unique(value)) <= FEW:
            how = (_loss_of(value.detach().cpu().float(), source) for source in _sources(value))
            if sentence := next(filter(None, how), ""):
                return f"{name} is {sentence}"
    return ""


def _loss_of(rows: Tensor, source: Tensor) -> str:
    """Return by what all rows of an input were made from rows of the data, if few values were left."""
    distinct = len(torch.unique(source))
    if source.is_floating_point():
        made = {"the whole part of": source.trunc() + 0.0}  # without -0.0
    else:
        divisors = {item for item in (255, 256, int(source.max())) if item >= LEAST_DIVISOR}
        made = {f"the whole part of 1/{item} of": source.long() // item for item in sorted(divisors)}
    for how, result in made.items():
        left = len(torch.unique(result))
        if distinct < LEAST_VALUES or not 1 < len(torch.unique(rows)) <= left <= FEW:
            continue
        # The script may shift and scale what is left, and move channels.
        patterns = (rows, (rows > rows.min()).float()) if left == 2 else (rows,)
        for layout in (result, result.movedim(-1, 1)):
            known = {row.tobytes() for row in layout.float().flatten(1).numpy()}
            if any(all(row.tobytes() in known for row in one.flatten(1).numpy()) for one in patterns):
                return f"{how} the data: of {distinct} different values, {left} are left"
    return ""


def _sources(value: Tensor) -> Iterator[Tensor]:
    """Yield the arrays with rows like those of an input that calling functions see, by variables and data sets."""
    frame, seen = sys._getframe(1), set[int]()
    while frame := frame.f_back:  # type: ignore[assignment]
        for item in _arrays([*frame.f_locals.values(), *frame.f_globals.values()], DEPTH, seen):
            numel = prod(item.shape)
            has_rows = item.ndim > 1 and len(value) <= len(item) and FEW * len(item) <= numel <= MOST_ELEMENTS
            if has_rows and numel * len(value) == value.numel() * len(item):
                yield torch.as_tensor(item).detach().cpu()


def _arrays(values: Iterable[Any], depth: int, seen: set[int]) -> Iterator[Any]:
    for value in values:
        if id(value) in seen:
            continue
        if isinstance(value, (Tensor, np.ndarray)):
            seen.add(id(value))
            if str(value.dtype).removeprefix("torch.").startswith(("uint8", "int", "float")):
                yield value
        elif depth and type(value) in (list, tuple, dict):
            yield from _arrays([*(value.values() if type(value) is dict else value)][:MOST_ENTRIES], depth - 1, seen)
        elif depth and isinstance(value, (DataLoader, Dataset)):
            yield from _arrays([*vars(value).values()], depth - 1, seen)
