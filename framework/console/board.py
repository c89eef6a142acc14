"""What a display knows of a run: the newest values, which way they go, the strategies that are done, the notices."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rich.text import Text

from ..hooks import Alert, Recovery, RunInfo, Series, always_on
from .grid import FALLING, FLAT, RISING, Cell, Group
from .text import number_text, printable, shortened, value_text

TREND_VALUES = 3
FLAT_BELOW = 1e-3
MOST_KEYS = 4
LONGEST_VALUE = 20
LARGEST = 1e300  # integers may be larger than any float
MEAN = "ø "
Groups = Mapping[str, Sequence[str]]
Label = Literal["note", "warning", "alert"]
LABEL_STYLES: Mapping[Label, str] = {"warning": "bold yellow", "alert": "bold yellow", "note": "bold cyan"}


class Notice(NamedTuple):
    """A sentence to the user."""

    label: Label
    sentence: str

    def text(self, remark: str = "") -> Text:
        """Return the notice as one line, its label in its colour."""
        return Text.assemble((f"{self.label}: ", LABEL_STYLES[self.label]), printable(self.sentence), remark)


@dataclass
class Track:
    """One metric of a strategy: its newest value and when it came, its last numbers, and its news for a table."""

    last: Any = None
    recent: list[float] = field(default_factory=list)
    total: float = 0.0  # the sum of a series' numbers since the last table
    count: int = 0  # how many these are
    is_news: bool = True
    told: str | None = None  # how the last table showed it
    epoch: int = 0
    step: int = 0

    def add(self, value: Any, kept: int = TREND_VALUES) -> None:
        """Take in a value, or further values of a series; ``kept`` of all numbers are remembered."""
        values = value.values if isinstance(value, Series) else [value]
        numbers = [one for one in values if isinstance(one, float) or (isinstance(one, int) and abs(one) < LARGEST)]
        self.last, self.is_news = values[-1], True
        self.recent = [*self.recent, *numbers[-kept:]][-kept:]
        if isinstance(value, Series):
            self.total += sum(numbers)
            self.count += len(numbers)
        else:
            self.total, self.count = 0.0, 0

    def brief(self) -> str:
        """Return the newest value in at most twenty columns."""
        return shortened(printable(value_text(self.last, LONGEST_VALUE)), LONGEST_VALUE, keep_end=False)

    def mean(self) -> str:
        """Return the mean of a series since the last table, in at most twenty columns, or else the newest value."""
        return MEAN + number_text(self.total / self.count) if self.count else self.brief()

    def describe_type(self, age: str) -> str:
        """Return the newest value, or of a series the mean since the last table, saying so, and how old it is."""
        remarks = [f"mean of {self.count:,}"] * (self.count > 1) + [age] * bool(age)
        number = number_text(self.total / self.count) if self.count else self.brief()
        return number + (f" ({', '.join(remarks)})" if remarks else "")


def arrow_of(values: Sequence[float]) -> str:
    """Return the arrow of the last three values, or nothing for fewer, or where one of them is not finite.

    Flat is a change from the first to the last of at most 0.1 % of the largest of the three in magnitude.

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
    """Yield metrics, and small dicts among them key by key.

    >>> dict(flattened({"h/loss": 0.5, "h/evaluation": {"val_loss": 2.0}}))
    {'h/loss': 0.5, 'h/evaluation/val_loss': 2.0}
    """
    for name, value in metrics.items():
        if isinstance(value, Mapping) and 0 < len(value) <= MOST_KEYS:
            yield from ((f"{name}/{key}", item) for key, item in value.items())
        else:
            yield name, value


def count_of(value: Any) -> int:
    """Count the numbers of a metric.

    >>> count_of({"a": [1, 2], "b": Series([1, 2], [{"c": 1}, {"c": 2}])}), count_of("a text")
    (4, 1)
    """
    inner = value.values() if isinstance(value, Mapping) else value.values if isinstance(value, Series) else value
    return 1 if isinstance(inner, str) or not isinstance(inner, Iterable) else sum(map(count_of, inner))


@dataclass
class Board:
    """The state of a display, and nothing of how it looks."""

    live_metrics: Groups = field(default_factory=dict)  # without any, those of hooks that are always on
    kept: int = TREND_VALUES  # numbers that are remembered of each metric
    run: RunInfo | None = None
    epoch: int = 0
    step: int = 0
    results: list[Mapping[str, Any]] = field(default_factory=list)  # summaries of the strategies that have ended
    notices: list[Notice] = field(default_factory=list)
    printed_lines: int = 0
    tracks: dict[str, Track] = field(default_factory=dict)
    count: int = 0  # the numbers that came since the last table, those of single parameters among them
    alerts: Counter[str] = field(default_factory=Counter)  # those since the last table, by kind

    def __post_init__(self) -> None:
        """Gather the names of the live metrics."""
        self._live_names = {name for names in self.live_metrics.values() for name in names}

    def begin(self, run: RunInfo) -> None:
        """Begin a strategy: its values are its own."""
        self.run, self.epoch, self.step, self.count = run, 0, 0, 0
        self.tracks.clear()
        self.alerts.clear()

    def take(self, metrics: Mapping[str, Any], epoch: int, step: int) -> None:
        """Take in the metrics of one emit; those of single parameters (a/b/c) only if they are among the live ones."""
        self.epoch, self.step, self.count = epoch, step, self.count + count_of(metrics)
        shown = {name: value for name, value in metrics.items() if name.count("/") < 2 or name in self._live_names}
        for name, value in flattened(shown):
            if name not in self.tracks:
                self.tracks[name] = Track()
            track = self.tracks[name]
            track.add(value, self.kept)
            track.epoch, track.step = epoch, value.steps[-1] if isinstance(value, Series) else step

    def warned(self, alerts: Iterable[Alert]) -> None:
        """Count alerts; that something is over is none."""
        self.alerts.update(alert.kind for alert in alerts if not isinstance(alert, Recovery))

    def age(self, track: Track) -> int:
        """Return by how many epochs, in the step loop steps, a value is older than the newest one."""
        in_epochs = self.run is not None and self.run.loop == "epoch"
        return self.epoch - track.epoch if in_epochs else self.step - track.step

    def news(self) -> dict[str, Track]:
        """Return the metrics that came since the last table."""
        return {name: track for name, track in self.tracks.items() if track.is_news}

    def is_told(self) -> None:
        """Remember that a table has shown the news."""
        for track in self.news().values():
            track.told, track.is_news, track.total, track.count = track.mean(), False, 0.0, 0
        self.count = 0
        self.alerts.clear()

    def position(self) -> dict[str, Any]:
        """Return how far the strategy has come, in plain values, for :meth:`resume`."""
        tracks = {name: vars(track).copy() for name, track in self.tracks.items()}
        counts = {"count": self.count, "alerts": dict(self.alerts)}
        return {"epoch": self.epoch, "step": self.step, "tracks": tracks, **counts}

    def resume(self, run: RunInfo, position: Mapping[str, Any]) -> None:
        """Go on with a strategy where an earlier part of its run had come to."""
        self.begin(run)
        # A checkpoint of an older version keeps the values in another way: then they are gathered anew.
        if "tracks" in position:
            self.epoch, self.step = position["epoch"], position["step"]
            self.tracks |= {name: Track(**values) for name, values in position["tracks"].items()}
            self.count, self.alerts = position.get("count", 0), Counter(position.get("alerts", {}))

    def groups(self, cells: Mapping[str, Cell]) -> tuple[list[Group], list[Group]]:
        """Part metrics, by full name, into the groups of live ones and the others by hook.

        Where none of the live metrics came, those of hooks that are always on take their place. Hooks stand in the
        order in which their metrics were described. A live metric goes by the last part of its name, unless another of
        its group ends alike.
        """
        always = always_on()
        wanted: Groups = {"training": [name for name in cells if name.partition("/")[0] in always]}
        if self.live_metrics and (not self._live_names or self._live_names & cells.keys()):
            wanted = self.live_metrics
        live = []
        for heading, names in wanted.items():
            ends = {name: name.rpartition("/")[2] for name in names if name in cells}
            alike = Counter(ends.values())
            shown = {name: printable(end if alike[end] == 1 else name) for name, end in ends.items()}
            found = [cells[name]._replace(name=end) for name, end in shown.items()]
            live += [Group(printable(heading), found)] if found else []
        taken = {name for names in wanted.values() for name in names}
        described = self.run.metric_infos if self.run else ()
        hooks: dict[str, list[Cell]] = {name.partition("/")[0]: [] for name in described}
        for name in [name for name in cells if name not in taken]:
            hook, _, metric = name.partition("/")
            hooks.setdefault(hook, []).append(cells[name]._replace(name=printable(metric or hook)))
        return live, [Group(printable(hook), found) for hook, found in hooks.items() if found]
