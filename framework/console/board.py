"""What a display knows of a run: the newest values, which way they go, the strategies that are done, the notices."""

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..hooks import HookPoint, MetricSink, RunInfo, Series, always_on
from .grid import FALLING, FLAT, RISING, Cell, Group, brief, flattened
from .notices import Notice

TREND_VALUES = 3
FLAT_BELOW = 1e-3
Groups = Mapping[str, Sequence[str]]


class Track:
    """One metric as far as it has come: its newest value and the last three numbers."""

    def __init__(self) -> None:
        self.last: Any = None
        self._recent: deque[float] = deque(maxlen=TREND_VALUES)

    def add(self, value: Any) -> None:
        """Take in a value, or the values of a series."""
        values = value.values if isinstance(value, Series) else [value]
        self.last = values[-1]
        numbers = [item for item in values[-TREND_VALUES:] if isinstance(item, (int, float))]
        self._recent.extend(numbers)

    def position(self) -> list[Any]:
        """Return all that it knows, for :meth:`resumed`."""
        return [self.last, list(self._recent)]

    @classmethod
    def resumed(cls, position: Sequence[Any]) -> "Track":
        """Return the track of an earlier part of the run."""
        track = cls()
        track.last, recent = position
        track._recent.extend(recent)
        return track

    @property
    def arrow(self) -> str:
        """Which way the metric goes; see :func:`arrow_of`."""
        return arrow_of(self._recent)


def arrow_of(values: Sequence[float]) -> str:
    """Return the arrow of the last three values, or nothing for fewer, or where one of them is not finite.

    Flat is a change from the first to the last of at most 0.1 % of the largest of the three in magnitude.

    >>> arrow_of([1.0, 5.0, 2.0]), arrow_of([2.0, 1.0, 1.5]), arrow_of([1.0, 2.0, 1.0005]), arrow_of([1.0, 2.0])
    ('↑', '↓', '→', '')
    """
    if len(values) < TREND_VALUES or not all(map(math.isfinite, values)):
        return ""
    change = values[-1] - values[0]
    if abs(change) <= FLAT_BELOW * max(map(abs, values)):
        return FLAT
    return RISING if change > 0 else FALLING


def shown_metrics(metrics: Mapping[str, Any], live: Container[str] = ()) -> dict[str, Any]:
    """Leave out metrics of single parameters, whose names have three or more parts, unless they are ``live``.

    >>> shown_metrics({"norms/grad_norm/0.weight": 1.0, "norms/total_grad_norm": 2.0})
    {'norms/total_grad_norm': 2.0}
    """
    return {name: value for name, value in metrics.items() if name.count("/") < 2 or name in live}


@dataclass
class Board:
    """The state of a display, and nothing of how it looks.

    Args:
        live_metrics: full names by group; of nothing else than hooks that are always on where it is empty.
    """

    live_metrics: Groups = field(default_factory=dict)
    run: RunInfo | None = None
    epoch: int = 0
    step: int = 0
    results: list[Mapping[str, Any]] = field(default_factory=list)
    """The summaries of the strategies that have ended."""
    notices: list[Notice] = field(default_factory=list)
    printed_lines: int = 0
    tracks: dict[str, Track] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Gather the names of the live metrics."""
        self.live_names = {name for names in self.live_metrics.values() for name in names}

    def begin(self, run: RunInfo) -> None:
        """Begin a strategy: its values are its own."""
        self.run, self.epoch, self.step = run, 0, 0
        self.tracks.clear()

    def position(self) -> dict[str, Any]:
        """Return how far the strategy has come, in plain values, for :meth:`resume`."""
        tracks = {name: track.position() for name, track in self.tracks.items()}
        return {"epoch": self.epoch, "step": self.step, "tracks": tracks}

    def resume(self, run: RunInfo, position: Mapping[str, Any]) -> None:
        """Go on with a strategy where an earlier part of its run had come to."""
        self.begin(run)
        self.epoch, self.step = position["epoch"], position["step"]
        self.tracks |= {name: Track.resumed(track) for name, track in position["tracks"].items()}

    def take(self, metrics: Mapping[str, Any], epoch: int, step: int) -> None:
        """Take in the metrics of one emit; those of single parameters only if they are among the live ones."""
        self.epoch, self.step = epoch, step
        for name, value in flattened(shown_metrics(metrics, self.live_names)):
            track = self.tracks.get(name)
            if track is None:
                track = self.tracks[name] = Track()
            track.add(value)

    def cells(self) -> dict[str, Cell]:
        """Return the newest value of every metric by its full name; lists give way to numbers."""
        return {
            name: Cell(name, brief(track.last), track.arrow, rank=int(isinstance(track.last, (list, tuple))))
            for name, track in self.tracks.items()
        }


def parted(cells: Mapping[str, Cell], live_metrics: Groups, run: RunInfo | None) -> tuple[list[Group], list[Group]]:
    """Part metrics, by full name, into the groups of live ones and the others by hook.

    Without live metrics those of hooks that are always on are. Hooks stand in the order in which their metrics were
    described. A live metric goes by the last part of its name, unless another of its group ends alike.
    """
    groups = live_metrics or {"training": [name for name in cells if name.partition("/")[0] in always_on()]}
    live = []
    for heading, names in groups.items():
        here = [name for name in names if name in cells]
        short = [name.rpartition("/")[2] for name in here]
        shown = [last if short.count(last) == 1 else name for name, last in zip(here, short, strict=True)]
        live += [Group(heading, [cells[name]._replace(name=label) for name, label in zip(here, shown, strict=True)])]
    by_hook: dict[str, list[Cell]] = {name: [] for name in hooks_described(run)}
    for name in cells:
        if all(name not in names for names in groups.values()):
            hook, _, metric = name.partition("/")
            by_hook.setdefault(hook, []).append(cells[name]._replace(name=metric or hook))
    others = [Group(hook, found) for hook, found in by_hook.items()]
    return [group for group in live if group.metrics], [group for group in others if group.metrics]


def hooks_described(run: RunInfo | None) -> Iterable[str]:
    """Name the hooks whose metrics are described, in their order."""
    return dict.fromkeys(name.partition("/")[0] for name in (run.metric_infos if run else ()))


class BoardSink(MetricSink):
    """Brings every emit to a board and tells the display; storing is all that an emit costs."""

    name = "live"

    def __init__(self, board: Board, changed: Callable[[], None]) -> None:
        self._board = board
        self._changed = changed

    def set_run_context(self, run: RunInfo) -> None:
        """Begin a strategy."""
        self._board.begin(run)

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Store the metrics."""
        self._board.take(metrics, epoch, step)
        self._changed()
