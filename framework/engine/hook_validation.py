"""Validation of the values that hooks return: state, metric descriptions and tables; and checks before their start."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import UnsuitableError, UsageError, shortened
from ..hooks import MetricInfo, RunInfo, TrainingHook
from ..option_words import option_text
from .error_advice import unmet_need


def load_state(hook: TrainingHook, state: Any) -> None:
    """Load a hook's state; raises :class:`UsageError` if the kind of an entry differs from the hook's current state."""
    if sentence := _mismatch("its state", state, hook.state_dict()):
        raise UsageError(sentence)
    hook.load_state_dict(state)


def _mismatch(name: str, stored: Any, current: Any) -> str:
    """Return what is wrong with the kind of a ``stored`` value, or an empty text; mappings are compared recursively."""
    word, kinds = next(((word, kinds) for word, kinds in _KINDS.items() if isinstance(current, kinds)), ("", (object,)))
    if not isinstance(stored, kinds):
        return f"{name} is not a {word}"
    if not (isinstance(current, Mapping) and isinstance(stored, Mapping)):
        return ""
    return next(filter(None, (_mismatch(str(key), stored[key], current[key]) for key in current if key in stored)), "")


_KINDS = {"number": (int, float, Tensor), "string": (str,), "list": (list, tuple), "mapping": (Mapping,)}
"""Kinds of entries in the state of a hook; values of one kind can replace each other."""


def metric_infos(hook: TrainingHook) -> list[MetricInfo]:
    """Return the metric descriptions of a hook; raises ``TypeError`` for anything else."""
    infos = list(hook.describe_metrics())  # a list, since a generator would run later, outside of the isolation
    if invalid := [info for info in infos if not isinstance(info, MetricInfo)]:
        raise TypeError(f"returned {invalid[0]!r}; it must return a list of MetricInfo, such as metric_table(text)")
    return infos


def summary_table(hook: TrainingHook) -> Mapping[str, Mapping[str, float]]:
    """Return a hook's table for the summary of the run; raises ``TypeError`` for anything but rows of numbers."""
    table = hook.table()
    rows = list(table.values()) if isinstance(table, Mapping) else [None]
    numbers = [number for row in rows if isinstance(row, Mapping) for number in row.values()]
    if not all(isinstance(row, Mapping) for row in rows) or not all(
        isinstance(number, (int, float)) for number in numbers
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
