"""What a run was and how it ended, as its folder says: read or refused in a sentence, and compared with another run."""

import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..checkpoints import COUNT, NUMBERS, OBJECT, TEXT, Field, checked, is_there, read_json
from ..errors import UsageError
from ..hooks import RunInfo
from ..state import settings
from .config import ExperimentConfig

CONFIG = "experiment_config.json"
SUMMARY = "summary.json"
LONGEST_NAME = 200
NAME = Field(
    "a name in one line, without slashes",
    lambda value: (
        isinstance(value, str) and value.isprintable() and "/" not in value and 0 < len(value.encode()) <= LONGEST_NAME
    ),
)
"""Files are named after strategies: other text could lead out of the folder, or be longer than file systems take."""
TREATMENTS = Field(
    "an object of lists of names",
    lambda value: (
        isinstance(value, dict)
        and all(isinstance(parts, list) and all(map(TEXT.holds, parts)) for parts in value.values())
    ),
)
REQUIRED = {"experiment": NAME, "strategy": NAME, "config": OBJECT}
OPTIONAL = {
    **dict.fromkeys(("data", "hooks", "run", "options", "versions", "environment"), OBJECT),
    "treatments": TREATMENTS,
}
"""Earlier versions wrote records without some of these; an empty object stands for what is missing."""
SHOWN = {
    "strategy": NAME,
    "epochs": COUNT,
    "final": NUMBERS,
    "metrics": NUMBERS,
    "seconds": Field("an object with the seconds of training", lambda value: _has_number(value, "training")),
    "target_reached": Field("null or an object with an epoch", lambda value: not value or _has_number(value, "epoch")),
    "treatments": TREATMENTS,
    "hook_errors": Field(
        "a list of objects, each with a hook",
        lambda value: (
            isinstance(value, list) and all(isinstance(item, dict) and TEXT.holds(item.get("hook")) for item in value)
        ),
    ),
    "output_dir": TEXT,
}
"""What the comparison of strategies shows of one that was completed before."""


def _has_number(value: Any, name: str) -> bool:
    return NUMBERS.holds(value) and name in value


class Difference(NamedTuple):
    """An entry in which two records differ; ``None`` stands for a missing one."""

    name: str
    before: Any
    now: Any


def differences(before: Mapping[str, Any], now: Mapping[str, Any], leave_out: Collection[str] = ()) -> list[Difference]:
    """List the entries in which the same part of two records differs.

    >>> differences({"lr": 0.1, "seed": 1}, {"lr": 0.2, "seed": 2, "beta": 0.9}, {"seed"})
    [Difference(name='lr', before=0.1, now=0.2), Difference(name='beta', before=None, now=0.9)]
    """
    pairs = [Difference(name, before.get(name), now.get(name)) for name in {**before, **now} if name not in leave_out]
    return [pair for pair in pairs if pair.before != pair.now]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What was run, in plain values: the content of ``experiment_config.json``, and part of a checkpoint's manifest."""

    experiment: str
    strategy: str
    config: Mapping[str, Any]
    data: Mapping[str, Any] = field(default_factory=dict)
    hooks: Mapping[str, Any] = field(default_factory=dict)
    """The options of every hook that was on, by its name."""
    treatments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The committing hooks, by name, with the parts of the training state that each changes."""
    run: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the command that started the run."""
    versions: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """Read the record of the run in ``folder``; raises :class:`UsageError` where there is none that can be used."""
        path = folder / CONFIG
        if not is_there(path):
            raise UsageError(f"{folder} is not the folder of a run: there is no {CONFIG} in it.")
        return cls.of(read_json(path), path)

    @classmethod
    def of(cls, content: Mapping[str, Any], path: Path) -> "RunRecord":
        """Make a record of the content of the file ``path``; raises :class:`UsageError` for a field that is wrong."""
        fields = REQUIRED | {name: kind for name, kind in OPTIONAL.items() if name in content}
        checked(content, fields, path)
        return cls(**{name: content[name] for name in fields})

    @classmethod
    def of_run(cls, run: RunInfo) -> "RunRecord":
        """Describe a run that is under way, for the readers of a sink."""
        config = run.config.as_dict() if isinstance(run.config, ExperimentConfig) else run.config
        return cls(
            experiment=run.experiment,
            strategy=run.strategy,
            config=config if isinstance(config, Mapping) else {},
            treatments=run.treatments,
        )

    @property
    def surroundings(self) -> Mapping[str, Any]:
        """The versions and the environment, on which the last bits of a run's numbers may depend."""
        return {**self.versions, **self.environment}

    @property
    def treatments_text(self) -> str:
        """The treatments in words: ``none``, or ``grad_clip (gradients)``."""
        return ", ".join(f"{name} ({', '.join(parts)})" for name, parts in self.treatments.items()) or "none"


def read_status(folder: Path) -> str | None:
    """Return how the run in ``folder`` ended, or ``None`` without a summary: it is under way, or was killed.

    Raises :class:`UsageError` for a summary that cannot be read.
    """
    path = folder / SUMMARY
    return str(checked(read_json(path), {"status": TEXT}, path)["status"]) if is_there(path) else None


def read_completed(folder: Path) -> dict[str, Any] | None:
    """Return the summary of the run in ``folder``, or ``None`` unless that run is completed.

    Raises :class:`UsageError` for a summary that cannot be read, or lacks what is shown of it.
    """
    path = folder / SUMMARY
    return checked(read_json(path), SHOWN, path) if read_status(folder) == "completed" else None


def run_folders(path: Path, command: str) -> list[Path]:
    """Return the folders of runs at ``path``: itself, or those of an experiment's strategies.

    Raises :class:`UsageError`, which names the ``command`` that needs them, where there is none.
    """
    if is_there(path / CONFIG):
        return [path]
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        raise UsageError(f"{path} {problem}; {command} takes the folder of a run, OUTPUT_DIR/EXPERIMENT/STRATEGY.")
    found = sorted(config.parent for config in path.glob(f"*/{CONFIG}"))
    if not found:
        raise UsageError(
            f"{path} is not the folder of a run, and holds none: there is no {CONFIG}; {command} takes "
            "OUTPUT_DIR/EXPERIMENT/STRATEGY, or OUTPUT_DIR/EXPERIMENT for all strategies."
        )
    return found


def versions() -> dict[str, str]:
    """Return the versions of loopscope and of what its numbers depend on."""
    try:
        own = version("loopscope")
    except PackageNotFoundError:
        own = "not installed"
    return {"loopscope": own, "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}


def environment(model: nn.Module) -> dict[str, Any]:
    """Describe what else the numbers of a run may depend on, and the command that started it."""
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": str(next(model.parameters()).device),
        "threads": torch.get_num_threads(),
        **settings(),
        "command": sys.argv[1:],
    }
