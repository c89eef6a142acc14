"""What a hook may return, where it goes, and how step metrics wait on their device for one transfer."""

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
    """A step-level metric as sinks receive it: one value for each step at which it was reported."""

    steps: list[int]
    values: list[Any]


class MetricSink(ABC):
    """A destination of metrics; it may fail at any time without harm to the run, which then goes on without it."""

    name: ClassVar[str] = "sink"
    flag: ClassVar[str | None] = None
    """The option of the command line that asks for this sink, such as ``--hook-csv``."""
    option: ClassVar[str | None] = None
    """The argument of the constructor, a text, that this option takes; one without is a switch."""
    default: ClassVar[bool] = False
    """Whether the switch is on by itself; ``--no-...`` before its name then switches it off."""
    keeps: ClassVar[bool] = True
    """Whether what it is given stays when the run is over; a display keeps nothing."""
    includes: ClassVar[tuple[str, ...]] = ()
    """Names of the sinks whose files this one writes too: the command line makes none of those beside it."""

    @classmethod  # noqa: B027 - optional
    def check_installed(cls) -> None:
        """Raise :class:`UsageError` that says how to get it if a package that this sink needs is missing."""

    @classmethod
    def leaves(cls, strategy: str) -> Sequence[str]:
        """Return the names of the files and folders that this sink may leave in the run's folder."""
        return [f"{strategy}.{cls.name}"]

    def set_run_context(self, run: RunInfo) -> None:  # noqa: B027 - optional
        """Prepare for the strategy that starts now (open files, start an external run)."""

    def position(self) -> dict[str, Any]:
        """Return how far the sink has come, in plain values that JSON holds, for :meth:`resume`.

        Everything emitted so far has reached the operating system when it returns; nothing waits for the disk.
        """
        return {}

    def files(self) -> Sequence[Path]:
        """Return the files that are to be on the disk before a checkpoint with this :meth:`position` counts."""
        return ()

    def resume(self, run: RunInfo, position: Mapping[str, Any]) -> None:
        """Go on at the ``position`` of a checkpoint, in place of :meth:`set_run_context`: forget what came after it.

        By default the strategy is begun anew, which suits a sink that keeps nothing. Raises :class:`UsageError` where
        what was written up to the position is no longer there.
        """
        self.set_run_context(run)

    @abstractmethod
    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Take the metrics of one fire: host values, or a :class:`Series` of them for step-level points."""

    def alert(self, alerts: Sequence[Alert]) -> None:  # noqa: B027 - optional
        """Take what one call of a hook's ``check`` has warned of, in order."""

    def snapshot(self, epoch: int, step: int) -> None:  # noqa: B027 - optional
        """Take note that SNAPSHOT has fired, whether or not a hook reported anything there."""

    def flush(self) -> None:  # noqa: B027 - optional
        """Make everything emitted so far durable."""

    def close(self, status: str) -> None:  # noqa: B027 - optional
        """Finish the strategy; ``status`` is "completed", "failed" or "interrupted"."""


def _own(value: MetricValue, leaves: list[Tensor], name: object) -> MetricValue:
    """Copy the containers of a metric value, which its hook may go on using, and add its tensors to ``leaves``.

    Scalars and zero-dimensional arrays of NumPy become numbers.
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
        return {_key(key): _own(item, leaves, key) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_own(item, leaves, name) for item in value]
    if not isinstance(value, (int, float)):
        kind = f"tensor of {value.dtype} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        remedy = "a metric is a float, int, bool or zero-dimensional tensor, or a list or dict of these"
        raise TypeError(f"returned a {kind} as a metric; {remedy}; its name is {name!r}")
    return value


def _key(key: object) -> object:
    if isinstance(key, np.generic):
        key = key.item()
    if not isinstance(key, (str, int, float)):
        raise TypeError(f"returned a dict with the key {key!r} as a metric; such keys are texts or numbers")
    return key


def _filled(value: MetricValue, numbers: Iterator[Any]) -> Any:
    """Return ``value`` with its tensors replaced, in order, by the next of ``numbers``."""
    if isinstance(value, Tensor):
        return next(numbers)
    if isinstance(value, Mapping):
        return {key: _filled(item, numbers) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_filled(item, numbers) for item in value]
    return value


Group = tuple[torch.device, torch.dtype]
Origin = TypeVar("Origin")


class PendingMetrics(Generic[Origin]):
    """Metrics whose tensors wait on their devices, packed so that later changes of the originals do not show.

    ``add`` copies the tensors of one hook call into one small vector per device and dtype; ``to_host`` joins
    the vectors of all calls and moves each device's, whatever their dtypes, in one transfer.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Origin, Metrics, list[Group]]] = []
        self._packed: dict[Group, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, origin: Origin, metrics: Metrics) -> Metrics:
        """Queue the metrics of one hook call, told by its ``origin``, and return them with their tensors copied.

        Raises ``ValueError`` for a tensor that is not zero-dimensional, ``TypeError`` for anything but a mapping
        of metric values.
        """
        if type(metrics) is not dict and not isinstance(metrics, Mapping):
            kind = "None" if metrics is None else f"a {type(metrics).__name__}"
            raise TypeError(f"returned {kind}; a hook returns a dict of metrics, {{}} where it has none")
        if odd := [name for name in metrics if not isinstance(name, str)]:
            raise TypeError(f"returned a metric under the name {odd[0]!r}; names of metrics are texts")
        leaves: list[Tensor] = []
        own = {name: value if type(value) is float else _own(value, leaves, name) for name, value in metrics.items()}
        if not leaves:
            self._entries.append((origin, own, []))
            return own
        groups: dict[Group, list[Tensor]] = {}
        for leaf in leaves:
            groups.setdefault((leaf.device, leaf.dtype), []).append(leaf)
        copies = {key: torch.stack(group).detach() for key, group in groups.items()}
        for key, vector in copies.items():
            self._packed.setdefault(key, []).append(vector)
        keys = [(leaf.device, leaf.dtype) for leaf in leaves]
        self._entries.append((origin, own, keys))
        return _substituted(own, keys, {key: iter(vector) for key, vector in copies.items()})

    def on_host(self) -> list[tuple[Origin, dict[str, Any]]]:
        """Return the origin and the metrics, as host values, of every queued call, in order."""
        numbers = _on_host({key: torch.cat(vectors) for key, vectors in self._packed.items()})
        return [(origin, _substituted(metrics, keys, numbers)) for origin, metrics, keys in self._entries]

    def to_host(self) -> list[tuple[Origin, dict[str, Any]]]:
        """Return what :meth:`on_host` returns, and empty the queue."""
        host = self.on_host()
        self._entries.clear()
        self._packed.clear()
        return host


def _on_host(vectors: Mapping[Group, Tensor]) -> dict[Group, Iterator[Any]]:
    """Return the numbers of each vector, exactly, after one transfer for each device.

    Vectors of several dtypes travel as bytes, those of the widest numbers first, so that each begins where its dtype
    may begin.
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
    return {name: _filled(value, replacements) for name, value in metrics.items()}
