"""Sinks that pass metrics on to the loggers of somebody else's trainer."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ..hooks import HookPoint, MetricSink, Series


class LoggerSink(MetricSink):
    """Gives every number, at its step, to the loggers of a Lightning Trainer; lists are left out, which none takes."""

    name: ClassVar[str] = "trainer"

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Log the numbers of each step, in order."""
        by_step: dict[int, dict[str, float]] = {}
        for at, name, number in numbers_in(metrics, step):
            by_step.setdefault(at, {"epoch": epoch})[name] = number
        for at, numbers in sorted(by_step.items()):
            for logger in self._trainer.loggers:
                logger.log_metrics(numbers, at)

    def flush(self) -> None:
        """Let the loggers save what they have."""
        for logger in self._trainer.loggers:
            logger.save()


def numbers_in(metrics: Mapping[str, Any], step: int) -> Iterator[tuple[int, str, float]]:
    """Yield each number with its step and its name; a number in a dict is named ``metric/key``.

    >>> [*numbers_in({"norms/total": Series([1, 2], [0.5, 0.25]), "spread": {"max": 3.0}}, 2)]
    [(1, 'norms/total', 0.5), (2, 'norms/total', 0.25), (2, 'spread/max', 3.0)]
    """
    for name, value in metrics.items():
        if isinstance(value, Series):
            for at, item in zip(value.steps, value.values, strict=True):
                yield from numbers_in({name: item}, at)
        elif isinstance(value, Mapping):
            yield from numbers_in({f"{name}/{key}": item for key, item in value.items()}, step)
        elif isinstance(value, (int, float)):
            yield step, name, value
