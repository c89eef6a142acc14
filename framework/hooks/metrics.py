"""Metric values, sinks, and the queue that moves metrics to the host in one transfer."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from .alerts import Alert
from .contexts import RunInfo
from .hook_points import HookPoint

MetricValue = Any  # float | int | bool | zero-dimensional Tensor | list | dict of these
Metrics = Mapping[str, MetricValue]


@dataclass(frozen=True)
class Series:
    """The values of a step-level metric, one per step at which it was reported, as sinks receive them."""

    steps: list[int]
    values: list[Any]


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
    includes: ClassVar[tuple[str, ...]] = ()
    """Names of sinks whose files this one writes as well; the command line does not create those in addition."""

    @classmethod  # noqa: B027 - optional
    def check_installed(cls) -> None:
        """Raise :class:`UsageError` with installation advice if a required package is missing."""

    @classmethod
    def leaves(cls, strategy: str) -> Sequence[str]:
        """Return the names of the files and folders that this sink may create in the run's folder."""
        return [f"{strategy}.{cls.name}"]

    def set_run_context(self, run: RunInfo) -> None:  # noqa: B027 - optional
        """Prepare for a new strategy: open files, start an external run."""

    def position(self) -> dict[str, Any]:
        """Return the sink's current position as JSON values, for :meth:`resume`.

        Afterwards the operating system has all emitted data, but they need not be on the disk.
        """
        return {}

    def files(self) -> Sequence[Path]:
        """Return the files that must be on the disk before a checkpoint with this :meth:`position` is valid."""
        return ()

    def resume(self, run: RunInfo, position: Mapping[str, Any]) -> None:
        """Continue at the ``position`` of a checkpoint and discard later data; replaces :meth:`set_run_context`.

        By default the strategy starts again, which suits a sink that keeps nothing.

        Raises:
            UsageError: data written up to the position are missing.
        """
        self.set_run_context(run)

    @abstractmethod
    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Receive the metrics of one dispatch: host values, or a :class:`Series` of them for step-level points."""

    def alert(self, alerts: Sequence[Alert]) -> None:  # noqa: B027 - optional
        """Receive the alerts of one call of a hook's ``check``, in order."""

    def snapshot(self, epoch: int, step: int) -> None:  # noqa: B027 - optional
        """Receive notice of a SNAPSHOT, whether or not a hook reported metrics there."""

    def flush(self) -> None:  # noqa: B027 - optional
        """Write all emitted data to the disk."""

    def close(self, status: str) -> None:  # noqa: B027 - optional
        """Finish the strategy; ``status`` is "completed", "failed" or "interrupted"."""


def _copied_value(value: MetricValue, leaves: list[Tensor], name: object) -> MetricValue:
    """Copy the containers of a metric value, which its hook may reuse, and append its tensors to ``leaves``.

    NumPy scalars and zero-dimensional arrays become Python numbers.
    """
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        kind, shape = "a tensor" if isinstance(value, Tensor) else "an array", tuple(value.shape)
        remedy = "metrics are zero-dimensional tensors: return its mean or norm, or .tolist()"
        raise ValueError(f"returned {kind} of shape {shape} as {name!r}; {remedy}")
    if isinstance(value, Tensor) and not (value.is_complex() or value.is_meta):
        leaves.append(value)
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        value = float(value) if isinstance(value, np.floating) else value.item()
    if isinstance(value, Mapping):
        return {_plain_key(key): _copied_value(item, leaves, key) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied_value(item, leaves, name) for item in value]
    if not isinstance(value, (int, float)):
        kind = f"tensor of {value.dtype} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        remedy = "a metric is a float, int, bool or zero-dimensional tensor, or a list or dict of these"
        raise TypeError(f"returned a {kind} as a metric; {remedy}; its name is {name!r}")
    return value


def _plain_key(key: object) -> object:
    if isinstance(key, np.generic):
        key = key.item()
    if not isinstance(key, (str, int, float)):
        raise TypeError(f"returned a dict with the key {key!r} as a metric; such keys are strings or numbers")
    return key


def _with_numbers(value: MetricValue, numbers: Iterator[Any]) -> Any:
    """Return ``value`` with its tensors replaced, in order, by the next items of ``numbers``."""
    if isinstance(value, Tensor):
        return next(numbers)
    if isinstance(value, Mapping):
        return {key: _with_numbers(item, numbers) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_numbers(item, numbers) for item in value]
    return value


Group = tuple[torch.device, torch.dtype]
Origin = TypeVar("Origin")


class PendingMetrics(Generic[Origin]):
    """A queue of metrics whose tensors stay on their devices, as copies that later changes do not affect.

    ``add`` copies the tensors of one hook call into one small vector per device and dtype; ``to_host`` concatenates the
    vectors of all calls and moves them to the host in one transfer per device, for all dtypes together.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Origin, Metrics, list[Group]]] = []
        self._packed: dict[Group, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, origin: Origin, metrics: Metrics) -> Metrics:
        """Queue the metrics of one hook call, identified by its ``origin``, and return them with copied tensors.

        Raises:
            ValueError: a tensor is not zero-dimensional.
            TypeError: ``metrics`` is not a mapping from strings to metric values.
        """
        if type(metrics) is not dict and not isinstance(metrics, Mapping):
            kind = "None" if metrics is None else f"a {type(metrics).__name__}"
            raise TypeError(f"returned {kind}; a hook returns a dict of metrics, {{}} if it has none")
        if invalid := [name for name in metrics if not isinstance(name, str)]:
            raise TypeError(f"returned a metric under the name {invalid[0]!r}; names of metrics are strings")
        leaves: list[Tensor] = []
        copied = {
            name: value if type(value) is float else _copied_value(value, leaves, name)
            for name, value in metrics.items()
        }
        if not leaves:
            self._entries.append((origin, copied, []))
            return copied
        groups: dict[Group, list[Tensor]] = {}
        for leaf in leaves:
            groups.setdefault((leaf.device, leaf.dtype), []).append(leaf)
        copies = {key: torch.stack(group).detach() for key, group in groups.items()}
        for key, vector in copies.items():
            self._packed.setdefault(key, []).append(vector)
        keys = [(leaf.device, leaf.dtype) for leaf in leaves]
        self._entries.append((origin, copied, keys))
        return _substituted(copied, keys, {key: iter(vector) for key, vector in copies.items()})

    def on_host(self) -> list[tuple[Origin, dict[str, Any]]]:
        """Return the origin and the host values of every queued call, in order."""
        numbers = _on_host({key: torch.cat(vectors) for key, vectors in self._packed.items()})
        return [(origin, _substituted(metrics, keys, numbers)) for origin, metrics, keys in self._entries]

    def to_host(self) -> list[tuple[Origin, dict[str, Any]]]:
        """Return the result of :meth:`on_host` and clear the queue."""
        host = self.on_host()
        self._entries.clear()
        self._packed.clear()
        return host


def _on_host(vectors: Mapping[Group, Tensor]) -> dict[Group, Iterator[Any]]:
    """Return the exact numbers of each vector, after one transfer per device.

    Vectors of several dtypes are transferred as bytes, the widest dtype first, so that every vector is aligned.
    """
    by_device: dict[torch.device, list[Group]] = {}
    for group in sorted(vectors, key=lambda group: group[1].itemsize, reverse=True):
        by_device.setdefault(group[0], []).append(group)
    numbers: dict[Group, Iterator[Any]] = {}
    for groups in by_device.values():
        if len(groups) == 1:
            numbers[groups[0]] = iter(vectors[groups[0]].tolist())
            continue
        raw = torch.cat([vectors[group].view(torch.uint8) for group in groups]).cpu()
        parts = raw.split_with_sizes([vectors[group].nbytes for group in groups])
        numbers |= {group: iter(part.view(group[1]).tolist()) for group, part in zip(groups, parts, strict=True)}
    return numbers


def _substituted(metrics: Metrics, keys: list[Group], values: Mapping[Group, Iterator[Any]]) -> dict[str, Any]:
    """Return the metrics with each tensor replaced by the next value of its group."""
    if not keys:
        return dict(metrics)
    replacements = iter([next(values[key]) for key in keys])
    return {name: _with_numbers(value, replacements) for name, value in metrics.items()}
