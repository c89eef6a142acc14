"""Metric values, sinks, and the queue that moves metrics to the host in one transfer."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .alerts import Alert
from .hook_points import HookPoint

if TYPE_CHECKING:
    from .contexts import RunInfo  # imports torch, which the readers of records do not need

MetricValue = Any
"""A float, int, bool, zero-dimensional tensor or array, or a list or dict of these."""
Metrics = Mapping[str, MetricValue]
"""Values by metric name."""


@dataclass(frozen=True)
class Series:
    """The values of a step-level metric, one per step at which it was reported, as sinks receive them."""

    steps: list[int]
    values: list[Any]


def as_float(value: float) -> float:
    """Convert a number to a float; integers that are too large become infinite.

    >>> as_float(-(10**400)), as_float(True)
    (-inf, 1.0)
    """
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


class MetricSink(ABC):
    """A destination of metrics. If a sink fails, the run continues without it."""

    name: ClassVar[str] = "sink"
    flag: ClassVar[str | None] = None
    """Command-line option that enables this sink, such as ``--hook-csv``."""
    option: ClassVar[str | None] = None
    """Constructor argument, a string, that receives the option's value; ``None`` makes the option a switch."""
    default: ClassVar[bool] = False
    """Whether the sink is enabled by default; ``--no-...`` disables it."""
    keeps: ClassVar[bool] = True
    """Whether metrics remain available after the run; a display keeps none."""
    draws: ClassVar[bool] = True
    """Whether it may draw random numbers, so that its calls run on a separate stream; those that only write do not."""
    includes: ClassVar[tuple[str, ...]] = ()
    """Names of sinks whose files this one writes as well; a run with such a sink, too, uses only this one."""

    @classmethod  # noqa: B027 - optional
    def check_installed(cls) -> None:
        """Raise :class:`UsageError` with installation advice if a required package is missing."""

    def share_files(self, writer: "MetricSink") -> None:  # noqa: B027 - optional
        """Leave the files of :attr:`includes` to another sink that includes them; called before the first strategy."""

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the names of the files and folders that this sink may create in the run's folder."""
        return [f"{strategy}.{cls.name}"]

    def set_run_context(self, run: "RunInfo") -> None:  # noqa: B027 - optional
        """Prepare for a new strategy: open files, start an external run."""

    def position(self) -> dict[str, Any]:
        """Return the sink's current position as JSON values, for :meth:`resume`.

        Afterwards the operating system has all emitted data, but they need not be on the disk.
        """
        return {}

    def files(self) -> Sequence[Path]:
        """Return the files that must be on the disk before a checkpoint with this :meth:`position` is valid."""
        return ()

    def resume(self, run: "RunInfo", position: Mapping[str, Any]) -> None:
        """Continue at the ``position`` of a checkpoint and discard later data; replaces :meth:`set_run_context`.

        By default the strategy starts again, which suits a sink that keeps nothing.

        Raises:
            UsageError: data written up to the position are missing.
        """
        self.set_run_context(run)

    @abstractmethod
    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Receive the metrics of one delivery: host values, or a :class:`Series` of them for step-level points."""

    def alert(self, alerts: Sequence[Alert]) -> None:  # noqa: B027 - optional
        """Receive the alerts of one call of a hook's ``check``, in order."""

    def snapshot(self, epoch: int, step: int) -> None:  # noqa: B027 - optional
        """Receive notice of a SNAPSHOT, whether or not a hook reported metrics there."""

    def flush(self) -> None:  # noqa: B027 - optional
        """Write all emitted data to the disk."""

    def close(self, status: str) -> None:  # noqa: B027 - optional
        """Finish the strategy; ``status`` is "completed", "failed" or "interrupted"."""
