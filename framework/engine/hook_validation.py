"""Validation of the metric descriptions and tables that hooks return, and checks before their start."""

import inspect
from collections.abc import Iterable, Mapping

from ..errors import UnsuitableError, UsageError, shortened
from ..hooks import MetricInfo, RunInfo, StepSchedule, TrainingHook
from ..option_words import option_text
from ..registry import qualified
from .error_advice import unmet_need


def metric_infos(hook: TrainingHook) -> list[MetricInfo]:
    """Return the metric descriptions of a hook; raises ``TypeError`` for anything else."""
    infos = list(hook.describe_metrics())  # a list, since a generator would run later, outside of the isolation
    if invalid := [info for info in infos if not isinstance(info, MetricInfo)]:
        raise TypeError(f"returned {invalid[0]!r}; it must return a list of MetricInfo, such as metric_table(text)")
    return infos


def summary_table(hook: TrainingHook) -> Mapping[str, Mapping[str, float]]:
    """Return a hook's table for the summary of the run; raises ``TypeError`` for anything but rows of numbers."""
    table = hook.table()
    rows = table.values() if isinstance(table, Mapping) else [None]
    if not all(
        isinstance(row, Mapping) and all(isinstance(item, (int, float)) for item in row.values()) for row in rows
    ):
        raise TypeError(f"returned {shortened(repr(table))}; a table is a dict of rows, and a row is a dict of numbers")
    return table


def start(hook: TrainingHook, run: RunInfo) -> None:
    """Start a hook; raises :class:`UnsuitableError` if the run lacks something that the hook needs."""
    if hook.needs_reference_weights and run.reference_weights is None:
        raise UnsuitableError(
            f"Hook {hook.name!r} needs a reference solution, but none is given; pass a run or a file of final weights "
            f"with {option_text('reference', 'PATH')}."
        )
    if sentence := unmet_need(hook, run.lacks):
        raise UnsuitableError(sentence)
    if hook.needs_dense_gradients and (layer := _sparse_layer(run)):
        raise UnsuitableError(
            f"Hook {hook.name!r} reads dense gradients, but {layer} gives sparse ones (sparse=True); leave the hook "
            "out, or create the layer with sparse=False."
        )
    hook.start(run)


def _sparse_layer(run: RunInfo) -> str:
    """Return the name of the first trained layer with sparse gradients, or an empty text."""
    for name, module in run.model.named_modules():
        weight = vars(module).get("_parameters", {}).get("weight")
        if vars(module).get("sparse") is True and weight is not None and weight.requires_grad:
            return f"layer {name!r}" if name else "the model"
    return ""


def without_duplicates(hooks: Iterable[TrainingHook]) -> list[TrainingHook]:
    """Return the hooks as a list.

    Raises:
        UsageError: an object is not a hook, or two hooks have the same name.
    """
    by_name: dict[str, TrainingHook] = {}
    for hook in hooks:
        if not isinstance(hook, TrainingHook):
            name = hook if isinstance(hook, str) else str(getattr(hook, "__name__", "NAME"))
            remedy = f"create it with {name}(), or HookRegistry.get({name!r})() if it is registered"
            raise UsageError(f"{hook!r} is not a hook object; {remedy}.")
        if hook.name in by_name:
            raise UsageError(
                f"Two hooks are named {hook.name!r}: {qualified(type(by_name[hook.name]))} and "
                f"{qualified(type(hook))}; names must be unique, because metrics and states are keyed by them."
            )
        by_name[hook.name] = hook
    return list(by_name.values())


def options_of(hook: TrainingHook) -> str:
    """Return a hook's options, if it has attributes of the same names, and its schedule, as text."""
    values = {name.lstrip("_"): value for name, value in vars(hook).items()}
    options = inspect.signature(type(hook)).parameters
    names = [key for key in options if isinstance(values.get(key, ()), (str, float, int))]
    schedule = [] if hook.step_schedule == StepSchedule() else [str(hook.step_schedule)]
    return ", ".join([f"{name}={values[name]}" for name in names] + schedule)
