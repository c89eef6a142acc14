"""State of a display: the newest values and their trends, the finished strategies, and the notices."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.text import Text

from ..hooks import Alert, Series
from .grid import FALLING, FLAT, RISING, Cell, Group
from .text import number_text, printable, shortened, value_text

if TYPE_CHECKING:
    from ..hooks import RunInfo

TREND_VALUES = 3
FLAT_BELOW = 1e-3
MOST_KEYS = 4
LONGEST_VALUE = 20
MEAN = "ø "
Groups = Mapping[str, Sequence[str]]
Label = Literal["note", "warning", "alert", "critical", "critical alert"]
LABEL_STYLES: Mapping[Label, str] = {
    "critical": "bold red",
    "critical alert": "bold red",
    "warning": "bold yellow",
    "alert": "bold yellow",
    "note": "bold cyan",
}


class Notice(NamedTuple):
    """A sentence to the user."""

    label: Label
    sentence: str

    def text(self, remark: str = "") -> Text:
        """Return the notice as one line with a coloured label."""
        return Text.assemble((f"{self.label}: ", LABEL_STYLES[self.label]), printable(self.sentence), remark)


@dataclass
class Track:
    """One metric of a strategy: its newest value with epoch and step, its last numbers, and its state in tables."""

    last: Any = None
    recent: list[float] = field(default_factory=list)
    total: float = 0.0  # sum of a series' numbers since the last table
    count: int = 0  # number of terms of the sum
    is_news: bool = True
    told: str | None = None  # the text in the last table; checkpoints store this name
    epoch: int = 0
    step: int = 0

    def add(self, value: Any, kept: int = TREND_VALUES) -> None:
        """Add a value, or the values of a series; the last ``kept`` numbers are stored."""
        values = value.values if isinstance(value, Series) else [value]
        numbers = [item for item in values if isinstance(item, (int, float))]
        self.last, self.is_news = values[-1], True
        self.recent = [*self.recent, *numbers[-kept:]][-kept:]
        if isinstance(value, Series):
            self.total += sum(numbers)
            self.count += len(numbers)
        else:
            self.total, self.count = 0.0, 0

    def brief(self) -> str:
        """Return the newest value as text of at most 20 columns."""
        return shortened(printable(value_text(self.last, LONGEST_VALUE)), LONGEST_VALUE, keep_end=False)

    def mean(self) -> str:
        """Return the mean of a series since the last table, or the newest value of other metrics."""
        return MEAN + number_text(self.total / self.count) if self.count else self.brief()

    def describe(self, age: str) -> str:
        """Return the newest value and its age; of a series, the mean since the last table and the number of values."""
        remarks = [f"mean of {self.count:,}"] * (self.count > 1) + [age] * bool(age)
        number = number_text(self.total / self.count) if self.count else self.brief()
        return number + (f" ({', '.join(remarks)})" if remarks else "")


def arrow_of(values: Sequence[float]) -> str:
    """Return an arrow for the trend of the last three values; empty if there are fewer or one is not finite.

    The trend is flat if first and last differ by at most 0.1 % of the largest magnitude.

    >>> arrow_of([1.0, 5.0, 2.0]), arrow_of([2.0, 1.0, 1.5]), arrow_of([1.0, 2.0, 1.0005]), arrow_of([1.0, 2.0])
    ('↑', '↓', '→', '')
    """
    values = values[-TREND_VALUES:]
    if len(values) < TREND_VALUES or not all(map(math.isfinite, values)):
        return ""
    change = values[-1] - values[0]
    if abs(change) <= FLAT_BELOW * max(map(abs, values)):
        return FLAT
    return RISING if change > 0 else FALLING


def flattened(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield metrics, with the entries of small dicts as separate metrics.

    >>> dict(flattened({"h/loss": 0.5, "h/evaluation": {"val_loss": 2.0}}))
    {'h/loss': 0.5, 'h/evaluation/val_loss': 2.0}
    """
    for name, value in metrics.items():
        if isinstance(value, Mapping) and 0 < len(value) <= MOST_KEYS:
            yield from ((f"{name}/{key}", item) for key, item in value.items())
        else:
            yield name, value


def count_of(value: Any) -> int:
    """Count the values in a metric.

    >>> count_of({"a": [1, 2], "b": Series([1, 2], [{"c": 1}, {"c": 2}])}), count_of("a text")
    (4, 1)
    """
    inner = value.values() if isinstance(value, Mapping) else value.values if isinstance(value, Series) else value
    return 1 if isinstance(inner, str) or not isinstance(inner, Iterable) else sum(map(count_of, inner))


@dataclass
class Board:
    """The state of a display, independent of its layout."""

    live_metrics: Groups = field(default_factory=dict)  # by default the metrics of hooks that are always on
    kept: int = TREND_VALUES  # stored numbers per metric
    run: "RunInfo | None" = None
    epoch: int = 0
    step: int = 0
    results: list[Mapping[str, Any]] = field(default_factory=list)  # summaries of finished strategies
    notices: list[Notice] = field(default_factory=list)
    printed_lines: int = 0
    tracks: dict[str, Track] = field(default_factory=dict)
    count: int = 0  # values since the last table, including those of single parameters
    alerts: Counter[str] = field(default_factory=Counter)  # alerts since the last table, by kind

    def __post_init__(self) -> None:
        """Collect the names of the live metrics."""
        self._live_names = {name for names in self.live_metrics.values() for name in names}

    def start(self, run: "RunInfo") -> None:
        """Start a strategy without values."""
        self.run, self.epoch, self.step, self.count = run, 0, 0, 0
        self.tracks.clear()
        self.alerts.clear()

    def take(self, metrics: Mapping[str, Any], epoch: int, step: int) -> None:
        """Store the metrics of one emit; metrics of single parameters (a/b/c) only if they are live metrics."""
        self.epoch, self.step, self.count = epoch, step, self.count + count_of(metrics)
        shown = {name: value for name, value in metrics.items() if name.count("/") < 2 or name in self._live_names}
        for name, value in flattened(shown):
            if name not in self.tracks:
                self.tracks[name] = Track()
            track = self.tracks[name]
            track.add(value, self.kept)
            track.epoch, track.step = epoch, value.steps[-1] if isinstance(value, Series) else step

    def count_alerts(self, alerts: Iterable[Alert]) -> None:
        """Count alerts, but not recoveries and remarks."""
        self.alerts.update(alert.kind for alert in alerts if alert.severity != "info")

    def age(self, track: Track) -> int:
        """Return the age of a value relative to the newest one, in epochs, or in steps for the step loop."""
        in_epochs = self.run is not None and self.run.loop == "epoch"
        return self.epoch - track.epoch if in_epochs else self.step - track.step

    def news(self) -> dict[str, Track]:
        """Return the metrics with values since the last table."""
        return {name: track for name, track in self.tracks.items() if track.is_news}

    def mark_shown(self) -> None:
        """Mark the news as shown in a table."""
        for track in self.news().values():
            track.told, track.is_news, track.total, track.count = track.mean(), False, 0.0, 0
        self.count = 0
        self.alerts.clear()

    def position(self) -> dict[str, Any]:
        """Return the state of the strategy as plain values, for :meth:`resume`."""
        tracks = {name: vars(track).copy() for name, track in self.tracks.items()}
        counts = {"count": self.count, "alerts": dict(self.alerts)}
        return {"epoch": self.epoch, "step": self.step, "tracks": tracks, **counts}

    def resume(self, run: "RunInfo", position: Mapping[str, Any]) -> None:
        """Restore the state of a strategy from a checkpoint."""
        self.start(run)
        # Checkpoints of older versions have another format; then the values are collected again.
        if "tracks" in position:
            self.epoch, self.step = position["epoch"], position["step"]
            self.tracks |= {name: Track(**values) for name, values in position["tracks"].items()}
            self.count, self.alerts = position.get("count", 0), Counter(position.get("alerts", {}))

    @property
    def has_live_metrics(self) -> bool:
        """Whether the run has metrics to show first: those that were chosen, or those of hooks that are always on."""
        described = self.run.metric_infos if self.run else ()
        hooks = {name.partition("/")[0] for name in described}
        from ..hooks.selection import always_on  # needs torch, unlike the rest of this module

        return bool(self._live_names or hooks.intersection(always_on()))

    def groups(self, cells: Mapping[str, Cell]) -> tuple[list[Group], list[Group]]:
        """Split metrics, by full name, into groups of live metrics and groups of other metrics by hook.

        If no live metric has a value, the metrics of always-on hooks replace them. Hooks have the order in which their
        metrics were described. A live metric is named by the last part of its name, unless two in a group share it.
        """
        from ..hooks.selection import always_on

        always = always_on()
        wanted: Groups = {"training": [name for name in cells if name.partition("/")[0] in always]}
        if self.live_metrics and (not self._live_names or self._live_names & cells.keys()):
            wanted = self.live_metrics
        live = []
        for heading, names in wanted.items():
            ends = {name: name.rpartition("/")[2] for name in names if name in cells}
            alike = Counter(ends.values())
            shown = {name: printable(end if alike[end] == 1 else name) for name, end in ends.items()}
            group_cells = [cells[name]._replace(name=end) for name, end in shown.items()]
            live += [Group(printable(heading), group_cells)] if group_cells else []
        live_names = {name for names in wanted.values() for name in names}
        described = self.run.metric_infos if self.run else ()
        hooks: dict[str, list[Cell]] = {name.partition("/")[0]: [] for name in described}
        for name in [name for name in cells if name not in live_names]:
            hook, _, metric = name.partition("/")
            hooks.setdefault(hook, []).append(cells[name]._replace(name=printable(metric or hook)))
        return live, [Group(printable(hook), hook_cells) for hook, hook_cells in hooks.items() if hook_cells]
