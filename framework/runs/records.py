"""Records of runs: reading, checking and comparing what a run's folder contains about its options and its end.

The commands that read runs use this module, so it does not import torch, which takes over a second.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, get_type_hints

from ..durable_files import path_exists, read_json
from ..errors import UsageError, require
from .config import ExperimentConfig, describe_type, fits

if TYPE_CHECKING:
    from ..hooks import RunInfo

CONFIG = "experiment_config.json"
ATTACHED_RUNS = "loopscope-runs"
"""Default folder of attached runs; its name is no Python identifier, so that it cannot be imported by mistake."""
REWINDS = "rewinds"
"""The folder of rewinds: steps that were trained again."""
EXPLANATION = "explanation.json"
"""The file of a rewind in which :mod:`loopscope.laboratory.questions` explains a step."""
SUMMARY = "summary.json"
INCOMPLETE = "incomplete"
"""The status of a run that was trained to its end, but whose record lacks rows, because a sink failed."""
TRAINED = ("completed", INCOMPLETE)
"""The statuses of runs that were trained to their end."""
ATTACHED = "attached"
"""Experiment name of runs that were attached to a custom training loop or a trainer."""
REQUIRED = ("experiment", "strategy", "config")
"""Required fields of a record; records of earlier versions may lack others, which are then empty."""
LONGEST_NAME = 200
"""Maximal length in bytes of a strategy's name, which file names contain."""


class Training(TypedDict):
    """Training time of a run, in seconds."""

    training: float


class Reached(TypedDict):
    """The epoch in which a run reached its target."""

    epoch: int


class FailedHook(TypedDict):
    """A hook that raised."""

    hook: str


class FailedSink(TypedDict):
    """A sink that failed, and whether rows of the record are lost."""

    sink: str
    step: int
    error: str
    lost_rows: bool


class Completed(TypedDict):
    """Displayed fields in the summary of a strategy that an earlier command completed."""

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
    """An entry in which two records differ; ``None`` stands for a missing value."""

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


def is_file_name(value: str) -> bool:
    """Return whether files can be named after a value, which must not lead out of their folder."""
    return value.isprintable() and "/" not in value and 0 < len(value.encode()) <= LONGEST_NAME


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Description of a run, in plain values: ``experiment_config.json``, and part of a checkpoint's manifest."""

    experiment: str
    strategy: str
    config: Mapping[str, Any]
    data: Mapping[str, Any] = field(default_factory=dict)
    rows: Mapping[str, Any] = field(default_factory=dict)
    """The rows of the data: their number, their digest and what it covers, and the source of their order."""
    hooks: Mapping[str, Any] = field(default_factory=dict)
    """The options of every active hook, by its name."""
    treatments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The committing hooks, by name, with the parts of the training state that each changes."""
    run: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the command that started the run."""
    changed: Sequence[str] | None = None
    """The names of those that differ from the defaults and the preset; records of earlier versions lack them."""
    versions: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    """The settings of an attached run's training: optimizer, its options, batch size, seed, and those of a Trainer."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Properties of model and optimizer before the first step, for the diagnosis of the run."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """The script of an attached run, its start time, and the commit of the code."""

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """Read the record of the run in ``folder``; raise :class:`UsageError` if it is missing or unusable."""
        path = folder / CONFIG
        if not path_exists(path):
            raise UsageError(f"{folder} is not the folder of a run: it has no {CONFIG}.")
        return cls.of(read_json(path), path)

    @classmethod
    def of(cls, content: Mapping[str, Any], path: Path) -> "RunRecord":
        """Create a record from the content of the file ``path``; raise :class:`UsageError` for an invalid field."""
        hints = get_type_hints(cls).items()
        fields = checked_fields(content, {name: of for name, of in hints if name in content or name in REQUIRED}, path)
        for name in ("experiment", "strategy"):
            require(is_file_name(fields[name]), f"{path} cannot be used: its field {name!r} cannot be a name.")
        return cls(**fields)

    @classmethod
    def of_run(cls, run: "RunInfo") -> "RunRecord":
        """Describe a run in progress, for the readers of a sink."""
        config = run.config.as_dict() if isinstance(run.config, ExperimentConfig) else run.config
        plain = config if isinstance(config, Mapping) else {}
        return cls(experiment=run.experiment, strategy=run.strategy, config=plain, treatments=run.treatments)

    @property
    def seed(self) -> int | None:
        """The seed of the run, if it is known."""
        seed = self.config.get("seed", self.training.get("seed"))
        return seed if type(seed) is int else None

    @property
    def surroundings(self) -> Mapping[str, Any]:
        """The versions and the environment, which may affect the last bits of a run's numbers."""
        return {**self.versions, **self.environment}

    @property
    def treatments_text(self) -> str:
        """The treatments in words: ``none``, or ``grad_clip (gradients)``."""
        return ", ".join(f"{name} ({', '.join(parts)})" for name, parts in self.treatments.items()) or "none"


def read_status(folder: Path) -> str | None:
    """Return the status with which the run in ``folder`` ended, or ``None`` if it is in progress or was killed.

    Raises:
        UsageError: for a summary that cannot be read.
    """
    path = folder / SUMMARY
    return str(checked_fields(read_json(path), {"status": str}, path)["status"]) if path_exists(path) else None


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the content of the summary of the run in ``folder``; empty without one."""
    path = folder / SUMMARY
    return read_json(path) if path_exists(path) else {}


def read_left_out(folder: Path) -> dict[str, str]:
    """Return the reasons of the hooks that the run in ``folder`` left out, by name; empty without a summary.

    Raises:
        UsageError: for a summary that cannot be read.
    """
    left_out = read_summary(folder).get("hooks_left_out")
    return {str(name): str(reason) for name, reason in left_out.items()} if isinstance(left_out, Mapping) else {}


def read_outcome(folder: Path) -> Mapping[str, Any] | None:
    """Return status, number of steps and seconds of the run in ``folder``, or ``None`` if it has no summary."""
    path, hints = folder / SUMMARY, {"status": str, "steps": int, "seconds": Mapping[str, float]}
    return checked_fields(read_json(path), hints, path) if path_exists(path) else None


def read_last_step(folder: Path) -> int | None:
    """Return the last step that the run in ``folder`` began, ``None`` without a summary."""
    outcome = read_outcome(folder)  # a failed run failed in the step after its last completed one
    return None if outcome is None else int(outcome["steps"] + (outcome["status"] not in TRAINED))


def read_initial(folder: Path) -> Mapping[str, Any]:
    """Return the evaluation before the first step of the run in ``folder``; empty if the run has no summary.

    Raises:
        UsageError: for a summary that cannot be read.
    """
    summary = {"initial": {}} | read_summary(folder)
    return dict(checked_fields(summary, {"initial": Mapping[str, Any]}, folder / SUMMARY)["initial"])


def read_completed(folder: Path) -> dict[str, Any] | None:
    """Return the summary of the run in ``folder``, or ``None`` unless that run is completed.

    Raises:
        UsageError: for a summary that cannot be read, or lacks a displayed field.
    """
    if read_status(folder) not in TRAINED:
        return None
    summary = read_summary(folder)
    checked_fields(summary, get_type_hints(Completed), folder / SUMMARY)
    return summary


def checked_fields(content: Mapping[str, Any], hints: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of a file named in ``hints``; raise :class:`UsageError` for a missing or invalid one."""
    for name, annotation in hints.items():
        if name not in content:
            raise UsageError(f"{path} cannot be used: it has no field {name!r}.")
        if not fits(content[name], annotation):
            raise UsageError(f"{path} cannot be used: its field {name!r} must be {describe_type(annotation)}.")
    return {name: content[name] for name in hints}


def seed_name(seed: int | str) -> str:
    """Return the name of a seed's folder within the folder of its strategy."""
    return f"seed-{seed}"


def run_name(folder: Path, strategy: str) -> str:
    """Return the name of the run in a folder within its experiment: its strategy, and its seed if that has a folder."""
    is_seed = folder.name != strategy and re.fullmatch(seed_name(r"\d+"), folder.name)
    return f"{strategy} {folder.name}" if is_seed else strategy


def run_folders(path: Path, command: str, deeper: Iterable[Path] = ()) -> list[Path]:
    """Return the folders of runs at ``path``: itself, or those of an experiment's strategies or a strategy's seeds.

    Folders that are ``deeper`` in it are added, for a command that takes several experiments.

    Raises:
        UsageError: if none exists; the message names the ``command`` that needs them.
    """
    if path_exists(path / CONFIG):
        return [path]
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        raise UsageError(f"{path} {problem}; {command} takes the folder of a run, OUTPUT_DIR/EXPERIMENT/STRATEGY.")
    configs = [config for pattern in ("*", f"*/{seed_name('*')}") for config in path.glob(f"{pattern}/{CONFIG}")]
    folders = sorted({*(config.parent for config in configs), *deeper}, key=_name_and_seed)
    if not folders:
        deeper = sorted(config.parent for config in path.glob(f"*/*/{CONFIG}"))
        if deeper:
            raise UsageError(
                f"{path} is not the folder of a run, but has runs in deeper folders, such as {deeper[0]}; "
                f"give {command} one of them."
            )
        raise UsageError(
            f"{path} is not the folder of a run and contains none: {CONFIG} is missing; {command} takes "
            "OUTPUT_DIR/EXPERIMENT/STRATEGY, or OUTPUT_DIR/EXPERIMENT for all strategies."
        )
    return folders


def _name_and_seed(folder: Path) -> tuple[Path, int]:
    """Return a sort key: folders by name, and the seeds of one strategy by number."""
    seed = re.fullmatch(seed_name(r"(\d+)"), folder.name)
    return (folder.parent, int(seed[1])) if seed else (folder, -1)
