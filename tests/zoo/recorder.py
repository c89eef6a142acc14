"""The recorder of a case: attaches the hooks, and reads the diagnoses after the training."""

from pathlib import Path
from typing import Any

import loopscope
from loopscope.doctor import Diagnosis, History, diagnose
from loopscope.experiments import ModArithmeticRunner
from loopscope.runs import RunOptions, Session, read_history
from loopscope.sinks import JSONLSink


class Recorder:
    """Attaches hooks to the trainings of one case, with a folder for each.

    Args:
        folder: the folder of the case.
        group: the group of hooks.
    """

    def __init__(self, folder: Path, group: str = "health") -> None:
        self.folder = folder
        self.group = group
        self.runs: list[Path] = []
        self._scopes: list[Any] = []

    def attach(self, *target: Any, **options: Any) -> Any:
        """Attach the hooks to a training, and return its scope; further options are those of ``loopscope.attach``."""
        out = self.folder / f"run-{len(self.runs)}"
        self.runs.append(out)
        options = {"with_hooks": self.group, "display": "none", "out": out} | options
        self._scopes.append(loopscope.attach(*target, **options))
        return self._scopes[-1]

    def run_experiment(self, strategy: str, runner: type[Any] = ModArithmeticRunner, **config: Any) -> None:
        """Train one strategy of an experiment with the hooks."""
        settings = runner.config_class(output_dir=self.folder, **config)
        options = RunOptions(strategies=[strategy], with_hooks=self.group)
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
