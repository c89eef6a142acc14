"""Numbers that a script or its Trainer reports, such as those that it gives to a logger."""

import re
from collections.abc import Mapping
from typing import Any

from ..hooks import Metrics, RunDataContext, TrainingHook

VALIDATION = re.compile(r"(^|[/_. ])(val|valid|validation|eval|evaluation|test|dev)([/_. ]|$)", re.IGNORECASE)
"""Names of numbers of an evaluation."""


class ReportedNumbers(TrainingHook):
    """The origin of reported numbers in the record, ``reported/NAME``; it is never called."""

    name = "reported"

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return nothing."""
        return {}


REPORTED = ReportedNumbers()


def of_evaluation(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers that belong to an evaluation, by their names.

    >>> of_evaluation({"val_loss": 0.5, "train/loss": 0.4, "eval/acc": 0.9, "interval": 3})
    {'val_loss': 0.5, 'eval/acc': 0.9}
    """
    return {name: value for name, value in numbers.items() if VALIDATION.search(name)}


def numbers_of_call(kind: str, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers, by name, that a call of a logger's function contains.

    Args:
        kind: the module and the name of the function, such as ``mlflow.tracking.fluent.log_metric``.
        inputs: its positional arguments, without the logger itself, unless this has the numbers.
        options: its arguments by name.

    >>> numbers_of_call("torch.utils.tensorboard.writer.add_scalar", ("loss", 0.5, 3), {})
    {'loss': 0.5}
    >>> numbers_of_call("wandb.sdk.wandb_run.log", ({"loss": 0.5},), {})
    {'loss': 0.5}
    >>> from types import SimpleNamespace as Logger
    >>> numbers_of_call("stable_baselines3.common.logger.dump", (Logger(name_to_value={"train/loss": 0.5}), 10), {})
    {'train/loss': 0.5}
    """
    if kind == "stable_baselines3.common.logger.dump":
        return dict(inputs[0].name_to_value)
    if kind.endswith(("add_scalar", "log_metric")):
        names = ("tag", "scalar_value") if kind.endswith("add_scalar") else ("key", "value")
        given = dict(zip(names, inputs, strict=False)) | {name: options[name] for name in names if name in options}
        return {str(given[names[0]]): given[names[1]]} if len(given) == len(names) else {}
    first = inputs[0] if inputs else options.get("data", options.get("metrics", {}))
    return dict(first) if isinstance(first, Mapping) else {}
