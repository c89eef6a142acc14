"""What a run was and how it ended, as its folder says: read or refused in a sentence, and compared with another run."""

import platform
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, get_type_hints

import numpy as np
import torch
from torch import nn

from ..durable_files import is_there, plain_json, read_json
from ..errors import UsageError
from ..hooks import ConfiguredHook, RunInfo, treatments
from ..state import settings
from ..training import Ranks
from .config import ExperimentConfig, fits, in_words

CONFIG = "experiment_config.json"
SUMMARY = "summary.json"
ATTACHED = "attached"
"""What the experiment of a run is called that was attached to somebody's own loop."""
REQUIRED = ("experiment", "strategy", "config")
"""Earlier versions wrote records without some of the other fields; an empty object stands for them."""
LONGEST_NAME = 200
"""Bytes of the name of a strategy, after which files are named."""


class Training(TypedDict):
    """How long a run trained."""

    training: float


class Reached(TypedDict):
    """Where a run reached its target."""

    epoch: int


class FailedHook(TypedDict):
    """A hook that raised."""

    hook: str


class Completed(TypedDict):
    """What is shown of the summary of a strategy that was done before."""

    strategy: str
    epochs: int
    final: Mapping[str, float]
    metrics: Mapping[str, float]
    seconds: Training
    target_reached: Reached | None
    treatments: Mapping[str, Sequence[str]]
    hook_errors: Sequence[FailedHook]
    output_dir: str


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
    rows: Mapping[str, Any] = field(default_factory=dict)
    """The rows of the data: how many, their digest and what it covers, and where their order comes from."""
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
        hints = get_type_hints(cls).items()
        there = checked(content, {name: of for name, of in hints if name in content or name in REQUIRED}, path)
        for name in ("experiment", "strategy"):
            if not _can_name_a_file(there[name]):
                raise UsageError(f"{path} cannot be used: its field {name!r} cannot be a name.")
        return cls(**there)

    @classmethod
    def planned(
        cls, hooks: Sequence[ConfiguredHook], on_hook_error: str, audit_hooks: bool, reference: Any = None, **known: Any
    ) -> "RunRecord":
        """Say what is to be run with these ``hooks``; what else is ``known`` are fields by their names."""
        known["run"] = {"on_hook_error": on_hook_error, "audit_hooks": audit_hooks, "reference": reference}
        known["hooks"] = {item.hook.name: item.options for item in hooks}
        known["treatments"] = treatments(item.hook for item in hooks)
        return cls(**plain_json(known | {"versions": versions()}))

    @classmethod
    def of_run(cls, run: RunInfo) -> "RunRecord":
        """Describe a run that is under way, for the readers of a sink."""
        config = run.config.as_dict() if isinstance(run.config, ExperimentConfig) else run.config
        plain = config if isinstance(config, Mapping) else {}
        return cls(experiment=run.experiment, strategy=run.strategy, config=plain, treatments=run.treatments)

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
    return str(checked(read_json(path), {"status": str}, path)["status"]) if is_there(path) else None


def read_ended(folder: Path) -> Mapping[str, Any] | None:
    """Return how far the run in ``folder`` came, and in which time; ``None`` without a summary."""
    path, hints = folder / SUMMARY, {"status": str, "steps": int, "seconds": Mapping[str, float]}
    return checked(read_json(path), hints, path) if is_there(path) else None


def read_initial(folder: Path) -> Mapping[str, Any]:
    """Return the evaluation before the first step, which a run without a summary lacks, as :func:`read_status` does."""
    path = folder / SUMMARY
    summary = {"initial": {}} | (read_json(path) if is_there(path) else {})
    return dict(checked(summary, {"initial": Mapping[str, Any]}, path)["initial"])


def read_completed(folder: Path) -> dict[str, Any] | None:
    """Return the summary of the run in ``folder``, or ``None`` unless that run is completed.

    Raises :class:`UsageError` for a summary that cannot be read, or lacks what is shown of it.
    """
    if read_status(folder) != "completed":
        return None
    path = folder / SUMMARY
    summary = read_json(path)
    checked(summary, get_type_hints(Completed), path)
    return summary


def checked(content: Mapping[str, Any], hints: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of a file that have ``hints``; raises :class:`UsageError` that names the one that is wrong."""
    for name, annotation in hints.items():
        if name not in content:
            raise UsageError(f"{path} cannot be used: it has no field {name!r}.")
        if not fits(content[name], annotation):
            raise UsageError(f"{path} cannot be used: its field {name!r} must be {in_words(annotation)}.")
    return {name: content[name] for name in hints}


def _can_name_a_file(name: str) -> bool:
    """Return whether files can be named after ``name``; other text could lead out of the folder."""
    return name.isprintable() and "/" not in name and 0 < len(name.encode()) <= LONGEST_NAME


def seed_name(seed: int | str) -> str:
    """Return the name of the folder, within its strategy's, of one of the runs that differ in their seeds."""
    return f"seed-{seed}"


def run_folders(path: Path, command: str) -> list[Path]:
    """Return the folders of runs at ``path``: itself, or those of an experiment's strategies or a strategy's seeds.

    Raises :class:`UsageError`, which names the ``command`` that needs them, where there is none.
    """
    if is_there(path / CONFIG):
        return [path]
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        raise UsageError(f"{path} {problem}; {command} takes the folder of a run, OUTPUT_DIR/EXPERIMENT/STRATEGY.")
    configs = [config for pattern in ("*", f"*/{seed_name('*')}") for config in path.glob(f"{pattern}/{CONFIG}")]
    found = sorted((config.parent for config in configs), key=_by_seed)
    if not found:
        raise UsageError(
            f"{path} is not the folder of a run, and holds none: there is no {CONFIG}; {command} takes "
            "OUTPUT_DIR/EXPERIMENT/STRATEGY, or OUTPUT_DIR/EXPERIMENT for all strategies."
        )
    return found


def _by_seed(folder: Path) -> tuple[Path, int]:
    """Return what sorts folders by name, and those of seeds within one by number."""
    seed = re.fullmatch(seed_name(r"(\d+)"), folder.name)
    return (folder.parent, int(seed[1])) if seed else (folder, -1)


def versions() -> dict[str, str]:
    """Return the versions of loopscope and of what its numbers depend on."""
    try:
        own = version("loopscope")
    except PackageNotFoundError:
        own = "not installed"
    return {"loopscope": own, "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}


def environment(model: nn.Module, ranks: Ranks | None = None) -> dict[str, Any]:
    """Describe what else the numbers of a run may depend on, and the command that started it."""
    return {
        "processes": (ranks or Ranks()).place[1],
        "sharing": (ranks or Ranks()).sharing,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": str(next(model.parameters()).device),
        "threads": torch.get_num_threads(),
        **settings(),
        "command": sys.argv[1:],
    }
