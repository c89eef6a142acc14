"""Positions of a sequence that rounding makes equal, as bfloat16 does beyond 256."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .trial import Trial

LEAST = 16
"""Positions that a sequence needs."""
WAVES = {"sin", "cos"}
NEAR = 0.02
"""The relative error of rounding to bfloat16, and of frequencies that are rounded, too."""


def equal_positions(trial: Trial) -> str:
    """Return a sentence on two positions that are equal in a pass, or in a table of sines; empty without such ones."""
    for name, module in trial.model.named_modules():
        for attribute, table in _tensors_of(module):
            if (place := _equal_rows(table)) is not None:
                where = ".".join(filter(None, (name, attribute)))
                return f"positions {place} and {place + 1} have one entry in {where}, since they were rounded"
    positions = _NarrowPositions()
    trial.evaluate(needs_loss=False, train=False, mode=positions)
    return positions.found


class _NarrowPositions(TorchFunctionMode):
    """Notes positions, or multiples of them, that are rounded to equal numbers."""

    found = ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and look at its result, or at the angles of which it computes sines."""
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        values = args[0] if name in WAVES and args else result
        if self.found or not isinstance(values, Tensor):
            return result
        if values.dtype in (torch.float16, torch.bfloat16) or (name in WAVES and values.is_floating_point()):
            place = _equal_multiples(values)
            if place is not None:
                kind = str(result.dtype).removeprefix("torch.")
                self.found = f"positions {place} and {place + 1} are equal in {kind}, as results of {name}"
        return result


def _equal_multiples(values: Tensor) -> int | None:
    """Return a position that is equal to the next one, if values are multiples of positions."""
    table = values.detach()
    while table.ndim > 2:
        table = table[0]
    if table.ndim < 1 or max(table.shape) < LEAST:
        return None
    table = table.double()
    for rows in (table[:, None],) if table.ndim == 1 else (table, table.T):
        if len(rows) < LEAST:
            continue
        step = rows[1] - rows[0]
        exact = rows[0] + torch.arange(len(rows), device=rows.device)[:, None] * step
        is_linear = bool(step.any()) and bool(((rows - exact).abs() <= NEAR * exact.abs()).all())
        equal = (rows[1:] == rows[:-1]).all(1).nonzero().flatten()
        if is_linear and len(equal):
            return int(equal[0])
    return None


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return buffers, frozen parameters and plain tensors of a module itself."""
    named = [*module.named_buffers(recurse=False), *module.named_parameters(recurse=False), *vars(module).items()]
    return [(name, item) for name, item in named if isinstance(item, Tensor) and not item.requires_grad]


def _equal_rows(values: Tensor) -> int | None:
    """Return a row of a table of sines or cosines of positions that is equal to the next one; its first rows differ."""
    table = values.detach().squeeze()
    while table.ndim > 2:
        table = table[0]
    if table.ndim < 2 or len(table) < LEAST or not table.is_floating_point() or bool((table.abs() > 1 + NEAR).any()):
        return None
    is_first = bool(((table[0] == 0) | (table[0] == 1)).all())  # the sines and cosines of position 0
    is_equal = (table[1:] == table[:-1]).all(1)
    if not is_first or bool(is_equal[:LEAST].any()) or bool((table[-1] == 0).all()):
        return None
    places = is_equal.nonzero().flatten()
    return int(places[0]) if len(places) else None
