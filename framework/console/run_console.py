"""Display of a session: headers, progress, warnings, and the comparison at the end."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from math import ceil
from typing import Any, ClassVar, Literal

from rich.console import Console, RenderableType
from rich.text import Text

from ..hooks import ENDLESS, Alert, HookPoint, MetricSink, Recovery, RunInfo, Severity, SinkRegistry, TrainingHook
from ..hooks.selection import always_on, create_sinks
from ..loops import NoProgress, Progress
from ..runs import Display, RecordSink, RunFolder, Session
from ..training import TrainingTask
from . import tables
from .board import Groups, Label, Notice
from .live import LiveDisplay
from .progress import BarView, LineView, ProgressNumbers, TrainingProgress, View
from .terminal import has_foreign_bars, make_console, show_warnings, supports_full_screen
from .text import cleaned

MOST_SHOWN = 10  # alerts of one kind shown per strategy; SNAPSHOT lines count all, and a file has all
Mode = Literal["brief", "normal", "verbose", "live", "silent", "none"]
Kind = tuple[str, Severity, bool]  # hook/metric, the severity, and whether it is a recovery


@dataclass(eq=False)
class RunConsole(Display):
    """The display of one session; a context manager that restores the terminal.

    A failure in it disables the display and never ends the run.

    Args:
        mode: ``brief`` prints a line at the start, findings, and the diagnosis at the end, ``normal`` prints lines,
            ``verbose`` also hooks, files and tables of metrics, ``live`` uses the full screen, ``silent`` shows the
            progress bar and prints warnings at the end, ``none`` prints nothing. Without a terminal ``live`` is
            ``normal``.
        live_metrics: full names of the metrics to show first, by group.
        progress_metrics: full names of the metrics on the progress line, by label.
        compared_to: by final metric, the strategy from which the comparison shows the distance.
        recorded: whether a sink keeps all metrics.
        until: the last step to train, if it is earlier than the end of the task.
        label: the text before the progress bar, in place of the name of the run.
        bar: show a progress bar; a Trainer has its own.
        warnings: the class of warnings to show; others are passed to the previous ``showwarning``.
        alerts_of: names of the hooks whose alerts ``brief`` shows, besides the findings of the doctor.
        console: the output; by default standard output.
        clock: returns the time in seconds.
    """

    mode: Mode = "normal"
    _: KW_ONLY
    live_metrics: Groups = field(default_factory=dict)
    progress_metrics: Groups = field(default_factory=dict)
    compared_to: Mapping[str, str] = field(default_factory=dict)
    recorded: bool = False
    until: int | None = None
    label: str = ""
    bar: bool = True
    warnings: type[Warning] = Warning
    alerts_of: Collection[str] = ()
    console: Console = field(default_factory=make_console)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        """Choose the display that the console supports."""
        self._no_screen = self.mode == "live" and not supports_full_screen(self.console)
        self._mode: Mode = "normal" if self._no_screen else self.mode
        self._live = LiveDisplay(self.console, self.live_metrics, clock=self.clock) if self._mode == "live" else None
        self.notices: list[Notice] = self._live.board.notices if self._live else []
        # The full screen shows no number twice.
        watched = {name for names in self.live_metrics.values() for name in names} if self._live else set()
        shown = {label: names for label, names in self.progress_metrics.items() if not watched.issuperset(names)}
        self._numbers = ProgressNumbers(shown)
        shown_hooks = self.alerts_of if self._mode == "brief" else None
        self._watch = Watch(self.live_metrics, self._notify, immediate=self._mode != "silent", hooks=shown_hooks)
        self._hooks: list[str] = []  # of the previous strategy
        self._line_view: LineView | None = None
        self._exit = ExitStack()
        self._progress: TrainingProgress | None = None

    def __enter__(self) -> "RunConsole":
        """Show warnings as lines from now on."""
        self._exit.enter_context(show_warnings(self._warn, alerts=False, kind=self.warnings))
        self._exit.callback(self._print_silenced)
        if self._live is not None:
            self._exit.callback(self._live.leave, self._print_now)
        self._exit.callback(self._stop_progress)
        if self._no_screen:
            sentence = "The live display needs a terminal; the output is plain lines instead."
            self._notify(Notice("note", sentence))
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the bar or the screen, and restore the handling of warnings."""
        self._exit.close()

    def sinks(self) -> list[MetricSink]:
        """Return the sinks of the display: alerts, and the SNAPSHOT table or the full screen."""
        if self._mode == "none":
            return []
        if self._mode == "brief":
            return [self._watch]
        sinks: list[MetricSink] = [self._watch, self._numbers]
        if self._live is not None:
            sinks.append(self._live)
        elif self._prints_lines:
            table_sink: type[Any] = SinkRegistry.get("console")
            options = {"first": self.live_metrics, "recorded": self.recorded, "shown": self._snapshot_shown}
            options["tables"] = self._mode == "verbose"
            sinks.append(table_sink(console=self.console, **options))
        return sinks

    def strategy_started(self, run: RunInfo, task: TrainingTask, hooks: Sequence[TrainingHook]) -> Progress:
        """Print the header of a strategy, and start its progress display."""
        if self._mode == "brief":
            self._print(tables.brief_header(run, task))
            return NoProgress()
        names = [hook.name for hook in hooks]
        name = cleaned(RunFolder(run.output_dir, run.strategy).name)
        is_repeated = bool(names) and names == self._hooks
        hook_names = f"the {len(names)} of the previous strategy" if is_repeated else ", ".join(names) or "none"
        shown_hooks = hook_names if self._mode == "verbose" else ""
        self._hooks = names
        self._print(tables.strategy_header(run, task, shown_hooks, self._numbers.metrics, self.console.width))
        self._stop_progress()
        if self._mode == "none" or not self.bar:
            return NoProgress()
        shown_name = self.label or name
        view: View
        is_normal = self._prints_lines
        if self._live is not None:
            self._live.open()
            view = self._live
        elif self.console.is_jupyter or (self.console.is_interactive and not has_foreign_bars()):
            view = BarView(self.console, shown_name, transient=is_normal)
        else:
            view = self._line_view = LineView(self.console, shown_name, transient=is_normal, clock=self.clock)
        length, steps = 0 if run.is_endless else task.length, len(task.loader)
        steps_per_epoch = steps if steps < ENDLESS else None
        if self.until is not None:
            length = ceil(self.until / (1 if run.loop == "step" else steps_per_epoch or 1))
        self._progress = TrainingProgress(
            view,
            unit=run.loop,
            length=length,
            clock=self.clock,
            steps_per_epoch=steps_per_epoch,
            chosen=self._numbers.texts,
            losses=self._numbers.losses,
        )
        return self._progress

    def strategy_ended(self, summary: Mapping[str, Any]) -> None:
        """Remove the progress display and print the result of the strategy."""
        shown = cleaned(summary)
        if self._live is not None:
            self._live.board.results.append(shown)
        self._stop_progress()
        if text := tables.budget_text(shown.get("budget", {})):
            self._print(Text(f"loopscope: {text}"))
        if self._mode == "brief":
            self._print(tables.brief_result(shown))
        else:
            self._print(tables.result_line(shown))
        width = self.console.width if self.console.is_terminal or self.console.is_jupyter else None
        if findings := tables.findings_text(summary, width):
            self._print(findings)
        if self._mode == "verbose":
            for hook, rows in shown["hook_tables"].items():
                self._print(tables.hook_table(shown["strategy"], hook, rows, self.console.width))
        if summary["sample"]:
            self._print(tables.sample_text(shown["strategy"], summary["sample"]))

    def ended(self, summaries: Sequence[Mapping[str, Any]]) -> None:
        """Print the comparison of the strategies and the location of the results."""
        if self._mode == "brief":
            return
        if self._live is not None:
            self._live.leave(self._print_now)
        if len(summaries) > 1:
            rows = tables.comparison_rows(cleaned(summaries), self.compared_to)
            self._print(tables.comparison_table(rows, self.console.width))
        self._print(tables.results_text(summaries, self._watch.plotted, with_files=self._mode == "verbose"))

    @property
    def _prints_lines(self) -> bool:
        return self._mode in ("brief", "normal", "verbose")

    def _print(self, shown: RenderableType) -> None:
        if self._live is not None and self._live.is_on:
            self._live.transcript.append(shown)
        elif self._prints_lines or self._mode == "live":
            self._print_now(shown)

    def _print_now(self, shown: RenderableType) -> None:
        try:
            if isinstance(shown, Text) and not (self.console.is_interactive or self.console.is_jupyter):
                self.console.out(shown.plain, highlight=False)
            else:
                self.console.print(shown, soft_wrap=isinstance(shown, Text) and bool(shown.no_wrap))
        except OSError:  # broken pipe, or the terminal has closed
            self._mode = "none"

    def _notify(self, notice: Notice) -> None:
        is_repeated = notice.label == "note" and notice in self.notices and not self.console.is_terminal
        self.notices.append(notice)
        if not is_repeated:  # a log already has the line
            self._print(notice.text())

    def _warn(self, label: Label, sentence: str) -> None:
        self._notify(Notice(label, sentence))

    def _snapshot_shown(self) -> None:
        if self._line_view is not None:
            self._line_view.snapshot_shown()

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _print_silenced(self) -> None:
        """Print the notices that the silent display has withheld."""
        if self._mode == "silent":
            for notice, count in Counter(self.notices).items():
                self._print_now(notice.text(f" ({count} times)" if count > 1 else ""))


def watch(
    session: Session,
    mode: Mode = "normal",
    run: Callable[[Session], Any] = Session.run,
    *,
    until: int | None = None,
    label: str = "",
) -> Any:
    """Run a session with a display, and return the result of ``run``, by default its summaries.

    The display replaces that of the session; its sinks are added to those of the session. ``until`` and ``label`` are
    those of :class:`RunConsole`.
    """
    runner = session.runner

    def make_sinks() -> list[MetricSink]:
        return create_sinks(session.make_sinks())

    display = RunConsole(
        mode,
        live_metrics=runner.live_metrics,
        progress_metrics=runner.progress_metrics,
        compared_to=runner.compared_to,
        recorded=any(isinstance(sink, RecordSink) or sink.includes for sink in make_sinks()),
        until=until,
        label=label,
    )

    def all_sinks() -> list[MetricSink]:
        return [*display.sinks(), *make_sinks()]

    with display:
        return run(replace(session, make_sinks=all_sinks, display=display))


@dataclass(eq=False)
class Watch(MetricSink):
    """Shows alerts, at most one of a kind per epoch and SNAPSHOT interval and ten in all; finds a metric to plot.

    Of alerts with severity ``info`` it shows the first of each kind.

    Args:
        live_metrics: full names of the metrics to show first, by group.
        notify: shows a notice.
        immediate: show alerts at once; otherwise, at the end of the strategy, the first of each kind and the number of
            further ones.
        hooks: names of the hooks whose alerts are shown; by default those of all.
    """

    draws: ClassVar[bool] = False
    name = "alerts"
    keeps: ClassVar[bool] = False
    live_metrics: Groups
    notify: Callable[[Notice], None]
    immediate: bool
    hooks: Collection[str] | None = None

    def __post_init__(self) -> None:
        self.plotted = self._begin = ""
        self._wanted = [name for names in self.live_metrics.values() for name in names]
        self._epochs: dict[Kind, list[int]] = {}  # epochs in which a kind was shown
        self._since: set[Kind] = set()  # kinds shown since the last SNAPSHOT
        self._waiting: dict[Kind, list[Alert]] = {}

    def set_run_context(self, run: RunInfo) -> None:
        """Start a strategy; alerts shown at its end name it."""
        self._begin = "" if self.immediate else f"{run.strategy}: "

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Choose the first live metric with a value for plotting, or a metric of an always-on hook."""
        live_name = next((name for name in self._wanted if name in metrics), "")
        if live_name:
            self.plotted, self._wanted = live_name, self._wanted[: self._wanted.index(live_name)]
        elif not self.plotted:
            self.plotted = next((name for name in metrics if name.partition("/")[0] in always_on()), "")

    def alert(self, alerts: Sequence[Alert]) -> None:
        """Show the first alert of each kind, and the number of further ones."""
        kinds: dict[Kind, list[Alert]] = {}
        for alert in alerts:
            if self.hooks is not None and alert.hook not in self.hooks:
                continue
            kinds.setdefault((alert.kind, alert.severity, isinstance(alert, Recovery)), []).append(alert)
        for kind, same_kind in kinds.items():
            if not self.immediate:
                self._waiting.setdefault(kind, []).extend(same_kind)
            elif kind not in self._since and same_kind[0].epoch not in (epochs := self._epochs.setdefault(kind, [])):
                epochs.append(same_kind[0].epoch)
                is_remark = same_kind[0].severity == "info" and not isinstance(same_kind[0], Recovery)
                most = 1 if is_remark else MOST_SHOWN
                if len(epochs) <= most:
                    remark = " Further ones are only recorded." * (len(epochs) == most)
                    self._show(same_kind, f" in epoch {same_kind[0].epoch}", remark)
                self._since.add(kind)

    def snapshot(self, epoch: int, step: int) -> None:
        """Allow every kind to be shown again."""
        self._since.clear()

    def close(self, status: str) -> None:
        """Show the alerts that waited for the end."""
        for same_kind in self._waiting.values():
            self._show(same_kind, "")
        for memory in (self._waiting, self._epochs, self._since):
            memory.clear()

    def _show(self, alerts: Sequence[Alert], where: str, remark: str = "") -> None:
        more = f" (and {len(alerts) - 1:,} more{where})" if len(alerts) > 1 else ""
        severity = alerts[0].severity
        label: Label = "note" if severity == "info" else "critical alert" if severity == "critical" else "alert"
        self.notify(Notice(label, f"{self._begin}{alerts[0].kind}: {' '.join(str(alerts[0]).split())}{more}{remark}"))
