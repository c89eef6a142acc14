"""What a run shows while it goes: headers, a progress bar, warnings, and the comparison at the end."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar, Literal

from rich.console import Console, RenderableType
from rich.text import Text

from ..hooks import ENDLESS, Alert, HookPoint, MetricSink, Recovery, RunInfo, SinkRegistry, TrainingHook, always_on
from ..loops import NoProgress, Progress
from ..runs import Display, RecordSink, RunFolder, Session
from ..training import TrainingTask
from . import tables
from .board import Groups, Label, Notice
from .live import LiveDisplay
from .progress import BarView, LineView, ProgressNumbers, TrainingProgress, View
from .terminal import can_be_taken, make_console, show_warnings
from .text import cleaned

MOST_TOLD = 10  # alerts of one kind that are shown in a strategy; lines of SNAPSHOTs count all, and a file has them
Mode = Literal["normal", "live", "silent", "none"]


class RunConsole(Display):
    """The display of one session; a context manager that leaves the terminal as it was.

    What fails in it ends the display, never the run.

    Args:
        mode: ``normal`` shows everything line by line, ``live`` on the whole screen, ``silent`` the progress bar alone
            and in the end what was warned of, ``none`` nothing at all. Where there is no terminal ``live`` is
            ``normal``.
        live_metrics: the metrics that come first, as full names by group.
        progress_metrics: the metrics that the progress line repeats, as full names by label.
        compared_to: strategies from which the distance is shown in the comparison, by the number that is compared.
        recorded: whether a sink keeps all metrics.
        warnings: the kind of warnings that it shows; others go on to where they went before.
        console: where to show it; standard output by default.
        clock: the time in seconds.
    """

    def __init__(
        self,
        mode: Mode = "normal",
        *,
        live_metrics: Groups | None = None,
        progress_metrics: Groups | None = None,
        compared_to: Mapping[str, str] | None = None,
        recorded: bool = False,
        warnings: type[Warning] = Warning,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or make_console()
        self._live_metrics = live_metrics or {}
        self._recorded, self._warnings = recorded, warnings
        self._compared_to = compared_to or {}
        self._clock = clock
        self._no_screen = mode == "live" and not can_be_taken(self.console)
        self._mode: Mode = "normal" if self._no_screen else mode
        self._live = LiveDisplay(self.console, self._live_metrics, clock=clock) if self._mode == "live" else None
        self.notices: list[Notice] = self._live.board.notices if self._live else []
        # On the whole screen no number stands twice.
        watched = {name for names in self._live_metrics.values() for name in names} if self._live else set()
        shown = {label: names for label, names in (progress_metrics or {}).items() if not watched.issuperset(names)}
        self._numbers = ProgressNumbers(shown)
        self._watch = Watch(self._live_metrics, self._notify, each=self._mode != "silent")
        self._hooks: list[str] = []  # those of the strategy before
        self._line_told: Callable[[], None] = lambda: None
        self._exit = ExitStack()
        self._progress: TrainingProgress | None = None

    def __enter__(self) -> "RunConsole":
        """Show warnings as lines from now on."""
        warn: Callable[[Label, str], None] = lambda *said: self._notify(Notice(*said))
        self._exit.enter_context(show_warnings(warn, alerts=False, kind=self._warnings))
        self._exit.callback(self._tell_silenced)
        if self._live is not None:
            self._exit.callback(self._live.leave, self._tell)
        self._exit.callback(self._stop_progress)
        if self._no_screen:
            sentence = "--live needs a terminal to draw on, and there is none; the output is plain lines."
            self._notify(Notice("note", sentence))
        return self

    def __exit__(self, *error: object) -> None:
        """Take the bar or the screen away and let warnings go where they went before."""
        self._exit.close()

    def sinks(self) -> list[MetricSink]:
        """Return the sinks of the display: alerts, and the table at every SNAPSHOT, or what the screen shows."""
        if self._mode == "none":
            return []
        sinks: list[MetricSink] = [self._watch, *([self._numbers] if self._numbers.metrics else [])]
        if self._live is not None:
            sinks.append(self._live)
        elif self._mode == "normal":
            table_sink: type[Any] = SinkRegistry.get("console")
            options = {"first": self._live_metrics, "recorded": self._recorded, "told": lambda: self._line_told()}
            sinks.append(table_sink(console=self.console, **options))
        return sinks

    def strategy_started(self, run: RunInfo, task: TrainingTask, hooks: Sequence[TrainingHook]) -> Progress:
        """Show what is about to be trained, and start the bar or draw the screen."""
        names = [hook.name for hook in hooks]
        name = cleaned(RunFolder(run.output_dir, run.strategy).name)
        again = bool(names) and names == self._hooks
        told = f"the {len(names)} of the strategy before" if again else ", ".join(names) or "none"
        self._hooks = names
        self._print(tables.strategy_header(run, task, told, self._numbers.metrics, self.console.width))
        if self._mode == "none":
            return NoProgress()
        self._stop_progress()
        view: View
        is_normal = self._mode == "normal"
        if self._live is not None:
            self._live.open()
            view = self._live
        elif self.console.is_jupyter or self.console.is_interactive:
            view = BarView(self.console, name, transient=is_normal)
        else:
            view = LineView(self.console, name, transient=is_normal, clock=self._clock)
            self._line_told = view.told
        length, steps = 0 if run.is_endless else task.length, len(task.loader)
        known, texts = steps if steps < ENDLESS else None, self._numbers.texts
        self._progress = TrainingProgress(
            view, unit=run.loop, length=length, steps_per_epoch=known, clock=self._clock, chosen=texts
        )
        return self._progress

    def strategy_ended(self, summary: Mapping[str, Any]) -> None:
        """Take the bar away and say how the strategy ended."""
        shown = cleaned(summary)
        if self._live is not None:
            self._live.board.results.append(shown)
        self._stop_progress()
        self._print(tables.result_line(shown))
        if self.console.is_terminal:
            for hook, rows in shown["hook_tables"].items():
                self._print(tables.hook_table(shown["strategy"], hook, rows, self.console.width))
        elif shown["hook_tables"]:
            self._print(tables.tables_line(shown))
        if summary["sample"]:
            self._print(tables.sample_text(shown["strategy"], summary["sample"]))

    def ended(self, summaries: Sequence[Mapping[str, Any]]) -> None:
        """Compare the strategies and say where the results lie."""
        if self._live is not None:
            self._live.leave(self._tell)
        if len(summaries) > 1:
            rows = tables.comparison_rows(cleaned(summaries), self._compared_to)
            self._print(tables.comparison_table(rows, self.console.width))
        self._print(tables.results_text(summaries, self._watch.plotted))

    def _print(self, shown: RenderableType) -> None:
        if self._live is not None and self._live.is_on:
            self._live.transcript.append(shown)
        elif self._mode in ("normal", "live"):
            self._tell(shown)

    def _tell(self, shown: RenderableType) -> None:
        try:
            if isinstance(shown, Text) and not self.console.is_interactive:
                self.console.out(shown.plain, highlight=False)
            else:
                self.console.print(shown, soft_wrap=isinstance(shown, Text) and bool(shown.no_wrap))
        except OSError:  # the pipe is closed or the terminal gone: there is nobody to tell
            self._mode = "none"

    def _notify(self, notice: Notice) -> None:
        again = notice.label == "note" and notice in self.notices and not self.console.is_terminal
        self.notices.append(notice)
        if not again:  # who reads lines has it above
            self._print(notice.text())

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _tell_silenced(self) -> None:
        """Tell in the end what the silent display did not: no warning is lost."""
        if self._mode == "silent":
            for notice, count in Counter(self.notices).items():
                self._tell(notice.text(f" ({count} times)" if count > 1 else ""))


def watch(session: Session, mode: Mode = "normal", run: Callable[[Session], Any] = Session.run) -> Any:
    """Run a session, show it, and return its summaries, or what ``run`` returns of it.

    The display and its sinks take the place of the session's display, and stand beside its sinks.
    """
    runner, make_sinks = session.runner, session.make_sinks
    display = RunConsole(
        mode,
        live_metrics=runner.live_metrics,
        progress_metrics=runner.progress_metrics,
        compared_to=runner.compared_to,
        recorded=any(isinstance(sink, RecordSink) or sink.includes for sink in make_sinks()),
    )
    with display:
        return run(replace(session, make_sinks=lambda: [*display.sinks(), *make_sinks()], display=display))


class Watch(MetricSink):
    """Tells of alerts, of a kind at most one in an epoch and between SNAPSHOTs, and ten; and finds a metric to plot.

    Args:
        live_metrics: the metrics that come first, as full names by group.
        notify: shows a notice.
        each: tell at once; otherwise of each kind the first, and how many there were, when the strategy is over.
    """

    name = "alerts"
    keeps: ClassVar[bool] = False

    def __init__(self, live_metrics: Groups, notify: Callable[[Notice], None], *, each: bool) -> None:
        self.plotted = self._begin = ""
        self._wanted = [name for names in live_metrics.values() for name in names]
        self._notify, self._each = notify, each
        self._told: dict[tuple[str, bool], list[int]] = {}  # the epochs in which they were told
        self._since: set[tuple[str, bool]] = set()  # those told since the last SNAPSHOT
        self._waiting: dict[tuple[str, bool], list[Alert]] = {}

    def set_run_context(self, run: RunInfo) -> None:
        """Name the strategy where alerts wait for its end."""
        self._begin = "" if self._each else f"{run.strategy}: "

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Find the first of the live metrics, or else one of a hook that is always on."""
        found = next((name for name in self._wanted if name in metrics), "")
        if found:
            self.plotted, self._wanted = found, self._wanted[: self._wanted.index(found)]
        elif not self.plotted:
            self.plotted = next((name for name in metrics if name.partition("/")[0] in always_on()), "")

    def alert(self, alerts: Sequence[Alert]) -> None:
        """Tell of the first of each kind, and how many more there are."""
        kinds: dict[tuple[str, bool], list[Alert]] = {}
        for alert in alerts:
            kinds.setdefault((alert.kind, isinstance(alert, Recovery)), []).append(alert)
        for kind, found in kinds.items():
            if not self._each:
                self._waiting.setdefault(kind, []).extend(found)
            elif kind not in self._since and found[0].epoch not in (told := self._told.setdefault(kind, [])):
                told.append(found[0].epoch)
                if len(told) <= MOST_TOLD:
                    remark = " Others are only counted." * (len(told) == MOST_TOLD)
                    self._tell(found, f" in epoch {found[0].epoch}", remark)
                self._since.add(kind)

    def snapshot(self, epoch: int, step: int) -> None:
        """Tell of what comes from the next epoch on."""
        self._since.clear()

    def close(self, status: str) -> None:
        """Tell of what waited for the end."""
        for found in self._waiting.values():
            self._tell(found, "")
        for memory in (self._waiting, self._told, self._since):
            memory.clear()

    def _tell(self, found: Sequence[Alert], where: str, remark: str = "") -> None:
        more = f" (and {len(found) - 1:,} more{where})" if len(found) > 1 else ""
        label: Label = "note" if isinstance(found[0], Recovery) else "alert"
        self._notify(Notice(label, f"{self._begin}{found[0].kind}: {' '.join(str(found[0]).split())}{more}{remark}"))
