"""Objects in which third-party models, optimizers and schedulers keep their state."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclass
class Record:
    """A dataclass that contains lists and references."""

    total: float = 0.0
    seen: list[Any] = field(default_factory=list)
    owner: Any = None


@dataclass(slots=True)
class Slotted:
    """A dataclass with slots."""

    count: int = 0
    mean: torch.Tensor = field(default_factory=lambda: torch.zeros(2))


class Preconditioner:
    """State of an optimizer for a parameter: an object whose slots contain a tensor and an array."""

    __slots__ = ("factor", "history", "steps")

    def __init__(self) -> None:
        self.factor, self.history, self.steps = torch.eye(2), np.zeros(3), 0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.factor.mul_(0.5)
        self.history[1] += 1
        self.steps += 1
        return gradient * (1 + self.factor[0, 0])


class Named(dict[str, Any]):
    """A dict with attributes."""

    hits = 0


class Average:
    """An exponential average of parameters that a hook updates."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.shadow, self.updates = model, [item.detach().clone() for item in model.parameters()], 0

    def update(self, *_: Any) -> None:
        self.updates += 1
        for average, parameter in zip(self.shadow, self.model.parameters(), strict=True):
            average.lerp_(parameter.detach() + 1, 0.5)


class TwoOptimizers:
    """A wrapper around two optimizers that is not an optimizer itself."""

    def __init__(self, model: nn.Sequential) -> None:
        self.parts = [
            torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9),
            torch.optim.Adam(model[1].parameters()),
        ]

    @property
    def param_groups(self) -> list[Any]:
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


class Lookahead(torch.optim.Optimizer):
    """An optimizer that wraps another and shares its parameter groups."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, dict(base.defaults))

    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.steps = getattr(self, "steps", 0) + 1


class Warmup:
    """A scheduler without torch's base class, in the style of timm."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.values, self.best = optimizer, {"lr": [0.1]}, SimpleNamespace(metric=0.0)
        self.noise = np.random.default_rng(3)

    def step(self) -> None:
        self.values["lr"].append(float(self.noise.random()))
        self.best.metric += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.values["lr"][-1]


class Schedule:
    """A stateful function for LambdaLR."""

    def __init__(self) -> None:
        self.calls = [0]

    def factor(self, epoch: int) -> float:
        self.calls[0] += 1
        return 1 / self.calls[0]


class Wrapped(TwoOptimizers):
    """A wrapper around two optimizers for a model of any shape."""

    def __init__(self, model: nn.Module) -> None:
        first, *others = model.parameters()
        self.parts = [torch.optim.SGD([first], 0.1, momentum=0.9), torch.optim.Adam(others)]


def counting_hook() -> Callable[..., None]:
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1

    return hook
