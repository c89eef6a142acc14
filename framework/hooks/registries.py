"""The registries of sinks and experiments, with the checks of their classes; they do not import torch."""

import inspect
from typing import Any

from ..errors import UsageError
from ..registry import Registry, qualified
from .metrics import MetricSink


def is_name(name: Any) -> bool:
    """Return whether a value can be the name of a class in a registry."""
    return isinstance(name, str) and name.replace("_", "").isalnum()


def check_sink_class(sink: type[MetricSink]) -> None:
    """Check a sink class; raise :class:`UsageError` with advice if it is invalid."""
    if sink.name == MetricSink.name or not is_name(sink.name):
        raise UsageError(f"Sink class {qualified(sink)} needs a name of letters, digits and underscores.")
    if sink.option is not None and sink.option not in inspect.signature(sink).parameters:
        raise UsageError(f"Sink class {qualified(sink)} has the option {sink.option!r}, which its constructor lacks.")


def check_experiment_class(experiment: type[Any]) -> None:
    """Check an experiment class; raise :class:`UsageError` if it is invalid.

    The class checks itself, because this package must not import the one that defines experiments.
    """
    if not (isinstance(experiment, type) and hasattr(experiment, "check_class")):
        raise UsageError(f"{experiment!r} is not a subclass of ExperimentRunner, so it cannot be an experiment.")
    experiment.check_class()


SinkRegistry: Registry[type[MetricSink]] = Registry("sink", "loopscope.sinks", check_sink_class)
ExperimentRegistry: Registry[type[Any]] = Registry("experiment", "loopscope.experiments", check_experiment_class)
