"""Options of parameter groups, which optimizers may omit or keep as ``None``, as plain numbers."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def learning_rate_of(group: Mapping[str, Any]) -> float | Tensor:
    """Return the learning rate of a parameter group, NaN if it has none, as with Adafactor and ``lr=None``.

    A tensor, which schedulers write to in place, is returned as it is, or as a zero-dimensional view.
    """
    rate = group.get("lr")
    if type(rate) is float:
        return rate
    if isinstance(rate, Tensor) and rate.numel() == 1:
        return rate.reshape(()) if rate.ndim else rate
    return number_or(rate, math.nan)


def rounds_stochastically(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer rounds weights stochastically, by an attribute or option with such a name that is on.

    Examples are ``bf16_stochastic_round`` of torchao and ``stochastic_rounding`` of other packages.
    """
    named = (*vars(optimizer).items(), *group.items())
    return any("stochastic" in name and value is True for name, value in named)


def number_or(value: Any, default: float) -> float:
    """Return a value as a number, or ``default`` if it is none.

    >>> number_or(3, 0.0), number_or(None, 0.0)
    (3.0, 0.0)
    """
    if isinstance(value, str):
        return default
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # a RuntimeError for a tensor with several elements
        return default


def betas_of(group: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Return the decay rates of an optimizer's moments, or ``None`` for a group without them.

    >>> betas_of({"betas": (0.9, None)}), betas_of({"betas": [0.9, 0.95]}), betas_of({"lr": 0.1})
    (None, (0.9, 0.95), None)
    """
    values = group.get("betas")
    if not isinstance(values, (list, tuple)):
        return None
    numbers = tuple(number_or(value, math.nan) for value in values)
    return None if any(map(math.isnan, numbers)) else numbers
