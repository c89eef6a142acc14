"""The recorder of a case: attaches the hooks, and reads the diagnoses after the training."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import loopscope
import torch
from loopscope.doctor import Diagnosis, History, diagnose
from loopscope.experiments import ModArithmeticRunner
from loopscope.runs import RunOptions, Session, read_history
from loopscope.sinks import JSONLSink
from torch import Tensor, nn

HINTS = ("accumulate", "scaler", "scheduler", "loop")
"""Options of attach that an unedited loop does not need."""


class ShortScope:
    """A scope of a custom loop that yields a limited number of batches, for quick tests.

    Args:
        scope: the scope; all other calls are its own.
        most_batches: the number of batches.
    """

    def __init__(self, scope: Any, most_batches: int) -> None:
        self.scope = scope
        self.remaining = most_batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scope, name)

    def __enter__(self) -> "ShortScope":
        self.scope.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.scope.__exit__(*error)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the loader until the limit."""
        if self.remaining:
            for batch in self.scope.batches(loader):
                self.remaining -= 1
                yield batch
                if not self.remaining:
                    return


class UneditedScope:
    """The calls of a scope as the lines that they stand for in a loop without loopscope; the scope sees its events.

    Args:
        scope: the scope.
        model: the trained model, which evaluations put into eval mode.
        scaler: the scaler of the loop, if any.
    """

    def __init__(self, scope: Any, model: Any, scaler: Any) -> None:
        self.scope, self.model, self.scaler = scope, model, scaler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scope, name)

    def __enter__(self) -> "UneditedScope":
        self.scope.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.scope.__exit__(*error)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Return the batches of the loader."""
        return iter(loader)

    def backward(self, loss: Tensor, *, last: bool = False, **options: Any) -> None:
        """Run the backward pass."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(**options)

    def gradients_ready(self, loss: Any = None) -> None:
        """Do nothing."""

    def closure(self, function: Any) -> Any:
        """Return the closure."""
        return function

    def evaluate(self, function: Any, *inputs: Any, **options: Any) -> Any:
        """Evaluate as a script does, and log the numbers."""
        mode = self.model.training
        self.model.eval()
        with torch.no_grad():
            result = function(*inputs, **options)
        self.model.train(mode)
        if isinstance(result, dict):
            self.scope.log(result)
        return result

    def epoch_end(self, **numbers: Any) -> None:
        """Log the numbers."""
        self.scope.log(numbers)


class Recorder:
    """Attaches hooks to the trainings of one case, with a folder for each.

    Args:
        folder: the folder of the case.
        group: the group of hooks.
        most_batches: the number of batches after which custom loops end; by default they get all.
        unedited: let custom loops make no call of their scope.
    """

    def __init__(
        self, folder: Path, group: str = "health", most_batches: int | None = None, *, unedited: bool = False
    ) -> None:
        self.unedited = unedited
        self.folder = folder
        self.group = group
        self.most_batches = most_batches
        self.runs: list[Path] = []
        self._scopes: list[Any] = []

    def attach(self, *target: Any, **options: Any) -> Any:
        """Attach the hooks to a training, and return its scope; further options are those of ``loopscope.attach``."""
        out = self.folder / f"run-{len(self.runs)}"
        self.runs.append(out)
        # Schedules that depend on the speed of the machine would make the measured rates do so, too.
        options = {"with_hooks": self.group, "display": "none", "out": out, "budget": None} | options
        scaler = options.get("scaler")
        if is_unedited := self.unedited and isinstance(target[0], nn.Module):
            options = {name: value for name, value in options.items() if name not in HINTS}
        scope = loopscope.attach(*target, **options)
        self._scopes.append(scope)
        if is_unedited:
            return UneditedScope(scope, target[0], scaler)
        return scope if self.most_batches is None else ShortScope(scope, self.most_batches)

    def run_experiment(self, strategy: str, runner: type[Any] = ModArithmeticRunner, **config: Any) -> None:
        """Train one strategy of an experiment with the hooks."""
        settings = runner.config_class(output_dir=self.folder, **config)
        options = RunOptions(strategies=[strategy], with_hooks=self.group, budget=None)
        Session(runner(settings), options, make_sinks=lambda: [JSONLSink()]).run()
        self.runs.append(self.folder / runner.name / strategy)

    def histories(self) -> list[History]:
        """Return the histories of all trainings, from their records."""
        return [read_history(folder) for folder in self.runs]

    def diagnoses(self) -> list[Diagnosis]:
        """Return the diagnoses of all trainings, from their records."""
        return [diagnose(history) for history in self.histories()]

    def scope_diagnoses(self) -> list[Diagnosis]:
        """Return the diagnoses of the scopes; an experiment has none."""
        return [scope.diagnose() for scope in self._scopes]
