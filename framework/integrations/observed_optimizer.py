"""Optimizers of other libraries that are no ``torch.optim.Optimizer``, whose steps hooks see nevertheless."""

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.optim import Optimizer

from ..errors import UsageError


class ObservedOptimizer(Optimizer):
    """An optimizer of torch that stands for another object with ``param_groups`` and ``step``.

    Each step of the object is one of this optimizer, with its hooks. The state of the object is not known, so that no
    hook can repeat its steps.
    """

    def __init__(self, observed: Any) -> None:
        self._observed = ref(observed)
        self._running: Callable[[], Any] | None = None
        super().__init__([{**_options(group), "params": [*group["params"]]} for group in observed.param_groups], {})

    @property
    def observed(self) -> Any:
        """The object, or ``None`` if it no longer exists."""
        return self._observed()

    def run(self, function: Callable[[], Any]) -> Any:
        """Run a step of the object, and return its result."""
        if self._running is not None:  # that of a base class
            return function()
        for own, group in zip(self.param_groups, self.observed.param_groups, strict=False):
            own.update(_options(group))
        self._running = function
        try:
            return self.step()
        finally:
            self._running = None

    def step(self, closure: Any = None) -> Any:
        """Run the step of the object that is in progress; only the training may start one.

        Raises:
            UsageError: if a hook calls it.
        """
        if self._running is None:
            kind = type(self.observed)
            raise UsageError(
                f"The state of {kind.__module__}.{kind.__qualname__} is not known, so its steps cannot be repeated; "
                "leave the hook out, or train with an optimizer of torch."
            )
        return self._running()


def _options(group: Any) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


_OBSERVED: WeakKeyDictionary[Any, ObservedOptimizer] = WeakKeyDictionary()
"""The optimizers that stand for objects."""
_CLASSES: set[type] = set()
"""Classes whose steps are reported."""


def observe_steps(optimizer: Any) -> ObservedOptimizer:
    """Return the optimizer of torch that makes the steps of another one, from now on."""
    kind = next(base for base in type(optimizer).__mro__ if "step" in vars(base))
    if kind not in _CLASSES:
        _CLASSES.add(kind)
        # In the class, so that instances are pickled and copied as without it.
        kind.step = _reporting(kind.step)  # type: ignore[attr-defined]
    if optimizer not in _OBSERVED:
        _OBSERVED[optimizer] = ObservedOptimizer(optimizer)
    return _OBSERVED[optimizer]


def _reporting(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(function, optimizer, *args, **kwargs)
        observed = _OBSERVED.get(optimizer)
        return call() if observed is None else observed.run(call)

    return step


def are_referred(optimizers: Iterable[Optimizer], referred: set[int]) -> bool:
    """Return whether one of the optimizers, or of the objects for which they stand, has one of the ids."""
    return any(id(item.observed if isinstance(item, ObservedOptimizer) else item) in referred for item in optimizers)
