"""Summaries of runs, in plain values: the content of ``summary.json`` and of the display."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from traceback import format_exception
from typing import Any

from torch import nn

from ..checkpoints import StoppedError
from ..engine import HookManager
from ..errors import with_lines
from ..tensors import is_uninitialised
from ..training import peak_memory
from .records import INCOMPLETE, RunRecord


def build_summary(
    manager: HookManager,
    record: RunRecord,
    folder: Path,
    status: str,
    error: BaseException | None,
    seconds: Mapping[str, float],
    final: Mapping[str, float],
    initial: Mapping[str, float] = {},
    compared: Sequence[str] = (),
    final_loss: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Summarise a run up to now.

    ``compared`` are full names of the metrics in which strategies are compared, ``final_loss`` the result of
    :meth:`.RecentLosses.final_loss`.
    """
    loop, task, metrics = manager.state.loop, manager.task, manager.delivery.last()
    sink_errors = manager.delivery.sink_errors
    rate = None if loop.step_lr is None else float(loop.step_lr)
    if status == "completed" and any(error["lost_rows"] for error in sink_errors):
        status = INCOMPLETE
    summary: dict[str, Any] = {
        "experiment": record.experiment,
        "strategy": record.strategy,
        "status": status,
        "error": None if error is None else with_lines(error),
        "traceback": None if error is None else "".join(format_exception(error)),
        "seed": manager.state.streams.seed,
        "epochs": loop.epoch,
        "steps": loop.step,
        "skipped_steps": loop.skipped_steps,
        "target_reached": loop.reached,
        "seconds": dict(seconds),
        "steps_per_second": loop.step / seconds["training"] if seconds["training"] else None,
        "budget": {} if manager.budget is None else manager.budget.report(),
        "step_time": manager.profiler.clock.report(),
        # A profile resets the peaks for every hook.
        "peak_memory": {} if manager.profiler.enabled else peak_memory(),
        "model": model_size(task.model),
        **final_loss,
        "last_lr": None if rate is None or math.isnan(rate) else rate,
        "initial": dict(initial),
        "final": dict(final),
        "deltas": deltas(initial, final),
        "metrics": {name: float(metrics[name]) for name in compared if name in metrics},
        "sample": None,
        "treatments": {name: tuple(parts) for name, parts in record.treatments.items()},
        "hook_errors": manager.hooks.failures.errors,
        "sink_errors": sink_errors,
        "hooks_left_out": manager.hooks.failures.left_out,
        "compiled_graphs": manager.taps.graphs,
        "hook_tables": manager.hooks.tables,
        "hook_samples": manager.profiler.samples,
        "output_dir": str(folder),
    }
    return summary | ({"hook_profile": manager.profiler.report()} if manager.profiler.enabled else {})


def deltas(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return the changes of the numbers of an evaluation.

    >>> deltas({"loss": 3, "word": "a"}, {"loss": 1, "word": "b", "new": 2})
    {'loss': -2}
    """
    numbers = (int, float)
    both = [name for name in after if isinstance(after[name], numbers) and isinstance(before.get(name), numbers)]
    return {name: after[name] - before[name] for name in both}


def model_size(model: nn.Module) -> dict[str, int]:
    """Return the numbers of parameters and of trainable parameters, and the bytes of all parameters."""
    parameters = [parameter for parameter in model.parameters() if not is_uninitialised(parameter)]
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
    }


def status_after(error: BaseException | None) -> str:
    """Return the status of a run that an error has ended; a search that prunes a trial only interrupts its run."""
    # Recognised by its name, so that Optuna is not imported.
    is_pruned = any(kind.__name__ == "TrialPruned" for kind in type(error).__mro__)
    if is_pruned or isinstance(error, (KeyboardInterrupt, StoppedError)):
        return "interrupted"
    return "completed" if error is None else "failed"


def status_of_script(error: BaseException | None) -> str:
    """Return the status of an attached run whose script an error has ended; a script may exit with success."""
    is_success = isinstance(error, SystemExit) and not error.code  # such as that of ``stop_after``
    return "completed" if is_success else status_after(error)
