"""Everything that the oracle uses of loopscope; a refactoring that moves one of these names changes this file alone.

The surfaces, from the most to the least stable: the command line, ``loopscope.attach``, the names that ``loopscope``
exports, the files of a run as ``docs/file-formats.md`` describes them, and, at the end, two functions of inner rooms.
"""

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import loopscope
import torch
from loopscope.__main__ import main
from torch import nn

SHIPPED_HOOKS, EXPERIMENTS = "loopscope.training_hooks", "loopscope.experiments"
OTHER_FILES = {"digests.jsonl", "alerts.jsonl", "rows.jsonl"}  # JSONL files of a run other than its metrics
PLACE = {"epoch", "step", "hook_point"}  # keys of a line that are not metrics
OPTIMIZERS: list[torch.optim.Optimizer] = []
"""The optimizers that the experiments built, oldest first; see :func:`keep_optimizers`."""


def discover() -> None:
    """Fill the registries, like the command."""
    for package in (SHIPPED_HOOKS, EXPERIMENTS):
        import_module(package)


def shipped_hooks() -> list[str]:
    """Return the names of all hooks that are part of loopscope."""
    return sorted(hook.name for hook in loopscope.HookRegistry if hook.__module__.startswith(SHIPPED_HOOKS + "."))


def experiments() -> list[str]:
    """Return the names of all registered experiments."""
    return sorted(loopscope.ExperimentRegistry.names())


def run_command(*words: str) -> tuple[int, str, str]:
    """Run ``loopscope`` with these words in this process; return exit status, standard output and standard error."""
    streams, arguments = (sys.stdout, sys.stderr), sys.argv
    sys.argv = ["loopscope", *words]
    try:
        with moved_streams(), redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
            status = main()
    finally:
        sys.argv, (sys.stdout, sys.stderr) = arguments, streams
    return status, output.getvalue(), errors.getvalue()


def refusal(errors: str) -> str:
    """Return the class of the exception that ended a command, parsed from the traceback of ``--traceback``.

    >>> refusal('Traceback ...\\nloopscope.errors.UsageError: p is 0.\\nloopscope: p is 0.')
    'UsageError'
    """
    raised = re.findall(r"^(?:\w+\.)*(\w+)(?:: .*)?$", errors, re.MULTILINE)
    classes = [name for name in raised if name.endswith(("Error", "Exception", "Interrupt"))]
    if not classes:
        raise RuntimeError(f"The command failed without the traceback of an exception:\n{errors}")
    return classes[-1]


def keep_optimizers() -> None:
    """Make every registered experiment add the optimizers that it builds to ``OPTIMIZERS``."""
    for name in experiments():
        experiment = loopscope.ExperimentRegistry.get(name)
        if not hasattr(experiment.build_optimizer, "__wrapped__"):
            experiment.build_optimizer = keeping(experiment.build_optimizer)


def keeping(build: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return a method that adds the result of ``build`` to ``OPTIMIZERS``."""

    @wraps(build)
    def build_optimizer(self: Any, model: nn.Module) -> torch.optim.Optimizer:
        OPTIMIZERS.append(build(self, model))
        return OPTIMIZERS[-1]

    return build_optimizer


def read_metrics(folder: Path) -> Iterator[tuple[str, int, Any]]:
    """Yield (metric, step, value) of the record of a run, in its order, and of its alerts."""
    (record,) = (file for file in folder.glob("*.jsonl") if file.name not in OTHER_FILES)
    for line in read_lines(record):
        for name, value in line.items():
            if name in PLACE:
                continue
            if isinstance(value, dict) and value.keys() == {"steps", "values"}:
                for step, number in zip(value["steps"], value["values"], strict=True):
                    yield name, step, number
            else:
                yield name, line["step"], value
    if (alerts := folder / "alerts.jsonl").exists():
        for line in read_lines(alerts):
            yield f"alert/{line['hook']}/{line['metric']}", line["step"], [line["value"], line["limit"]]


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file."""
    yield from map(json.loads, file.read_text("utf-8").splitlines())


def read_final_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the state dict that a completed run wrote."""
    (file,) = folder.glob("*_final.pt")
    weights: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return weights


def attach(*targets: Any, **options: Any) -> Any:
    """Attach hooks to a loop or trainer, without a display."""
    return loopscope.attach(*targets, display="none", **options)


# Less stable: inner rooms.


@contextmanager
def moved_streams() -> Iterator[None]:
    """Make a command preserve the final state of its training's random generators, so that they can be recorded.

    Without it, a command and a session restore the generators of their caller.
    """
    from loopscope.cli import main as command_line
    from loopscope.runs import session

    modules = [sys.modules[command_line.__module__], session]
    preserved = [module.preserved_streams for module in modules]
    try:
        for module in modules:
            module.preserved_streams = nullcontext  # type: ignore[attr-defined]
        yield
    finally:
        for module, function in zip(modules, preserved, strict=True):
            module.preserved_streams = function  # type: ignore[attr-defined]


def quantize(model: nn.Module, recipe: str, seed: int, **metis: Any) -> None:
    """Cast the linear layers of a model, except its decoder, by a recipe of low precision."""
    from dataclasses import replace

    from loopscope.lowbit import MetisOptions, find_recipe, quantize_model

    chosen_recipe = find_recipe(recipe)
    if metis:
        chosen_recipe = replace(chosen_recipe, metis=MetisOptions(**metis))
    quantize_model(model, chosen_recipe, exclude=["decoder"], seed=seed)
