"""Several optimizers, or several schedulers, of one training as a single object."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class CombinedOptimizer:
    """Optimizers that each train a part of the model, such as Muon for matrices and AdamW for the other parameters.

    It has the interface that hooks and training steps use; its groups are those of all optimizers, in their order.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        """Step all optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()


class CombinedScheduler:
    """The schedulers of several optimizers, which step together."""

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        self.schedulers = list(schedulers)

    def step(self) -> None:
        """Step all schedulers."""
        for scheduler in self.schedulers:
            scheduler.step()


def single_scheduler(schedulers: Sequence[Any]) -> Any:
    """Return the only scheduler, or a :class:`CombinedScheduler` of several, or ``None``."""
    return CombinedScheduler(schedulers) if len(schedulers) > 1 else next(iter(schedulers), None)


def separate_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that a loop steps: those of a :class:`CombinedOptimizer`, or the given one alone."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def optimizer_classes(optimizer: Any) -> tuple[type[Optimizer], ...]:
    """Return the classes of the optimizers of a training, without duplicates."""
    return tuple(dict.fromkeys(type(item) for item in separate_optimizers(optimizer)))


def optimizer_name(optimizer: Any) -> str:
    """Return the names of the classes of the optimizers of a training, for messages and the record."""
    return " and ".join(type(item).__name__ for item in separate_optimizers(optimizer))


def scheduler_name(scheduler: Any) -> str | None:
    """Return the names of the classes of the schedulers of a training, for the record; ``None`` without a scheduler."""
    if scheduler is None:
        return None
    items = scheduler.schedulers if isinstance(scheduler, CombinedScheduler) else [scheduler]
    return " and ".join(type(item).__name__ for item in items)
