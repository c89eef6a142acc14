"""Runs that are over, as sinks send them again from their folders."""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..errors import UsageError
from ..hooks import MetricSink, RunInfo
from .config import ExperimentConfig
from .records import CONFIG, SUMMARY


@dataclass(frozen=True)
class RunDescription:
    """What a sink tells its readers of a run."""

    experiment: str
    strategy: str
    config: Mapping[str, Any]
    treatments: Mapping[str, tuple[str, ...]]
    """The committing hooks, by name, with the parts of the training state that each changes."""

    @classmethod
    def of_run(cls, run: RunInfo) -> "RunDescription":
        """Describe a run that is under way."""
        config = run.config.as_dict() if isinstance(run.config, ExperimentConfig) else run.config
        return cls(run.experiment, run.strategy, config if isinstance(config, Mapping) else {}, run.treatments)

    @classmethod
    def of_folder(cls, folder: Path) -> "RunDescription":
        """Describe the run that lies in ``folder``; raises :class:`UsageError` where there is none."""
        path = folder / CONFIG
        try:
            found = json.loads(path.read_text("utf-8"))
            treatments = {name: tuple(parts) for name, parts in found["treatments"].items()}
            return cls(found["experiment"], found["strategy"], dict(found["config"]), treatments)
        except OSError as error:
            raise UsageError(f"{folder} is no folder of a run: {path} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is not the configuration of a run: {type(error).__name__}: {error}.") from error

    @property
    def treatments_text(self) -> str:
        """The treatments in words: ``none``, or ``grad_clip (gradients)``."""
        return ", ".join(f"{name} ({', '.join(parts)})" for name, parts in self.treatments.items()) or "none"


def status_of(folder: Path) -> str:
    """Return how the run in ``folder`` ended; one without a summary was killed, and counts as failed."""
    try:
        return str(json.loads((folder / SUMMARY).read_text("utf-8"))["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return "failed"


class ReplaySink(MetricSink):
    """A sink that ``loopscope replay`` can send the record of a run to."""

    @classmethod
    @abstractmethod
    def replay(cls, folder: Path, **options: str) -> Callable[[], str]:
        """Check that the run in ``folder`` can be sent, and return what sends it and says in a sentence where to.

        Args:
            folder: of one strategy's run.
            options: what the user gave, by the names that :attr:`option` may have.

        Raises:
            UsageError: in both steps, for what the user can change.
        """


class RecordSink(MetricSink):
    """A sink whose file, ``STRATEGY.NAME`` in the folder of a run, can be read back when the run is over."""

    lossless: ClassVar[bool] = False
    """Whether the file is the one to read where there are several."""

    @classmethod
    @abstractmethod
    def read(cls, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the step and the metrics of each emit, in order; series are :class:`Series`, as they were emitted.

        Raises ``ValueError``, ``KeyError``, ``TypeError`` or ``AttributeError`` for what the sink has not written.
        """


def run_folders(path: Path, command: str = "replay") -> list[Path]:
    """Return the folders of runs at ``path``: itself, or those of an experiment's strategies.

    Raises :class:`UsageError` where there is none.
    """
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        raise UsageError(f"{path} {problem}; {command} takes the folder of a run, OUTPUT_DIR/EXPERIMENT/STRATEGY.")
    if (path / CONFIG).exists():
        return [path]
    found = sorted(config.parent for config in path.glob(f"*/{CONFIG}"))
    if not found:
        raise UsageError(
            f"{path} holds no run, and no folders of runs: there is no {CONFIG}; {command} takes "
            "OUTPUT_DIR/EXPERIMENT/STRATEGY, or OUTPUT_DIR/EXPERIMENT for all strategies."
        )
    return found
