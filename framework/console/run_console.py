"""What a run shows while it goes: headers, a progress bar, warnings, and the comparison at the end."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.text import Text

from ..hooks import MetricSink, RunInfo, SinkRegistry, TrainingHook
from ..loops import NoProgress, Progress
from ..runs import Display
from ..training import TrainingTask
from . import tables
from .board import Groups, Label, Notice
from .live import LiveDisplay
from .progress import BarView, LineView, ProgressNumbers, TrainingProgress, View
from .terminal import can_be_taken, make_console, show_warnings

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
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or make_console()
        self.notices: list[Notice] = []
        self._live_metrics = live_metrics or {}
        self._numbers = ProgressNumbers(progress_metrics or {})
        self._compared_to = compared_to or {}
        self._no_screen = mode == "live" and not can_be_taken(self.console)
        self._mode: Mode = "normal" if self._no_screen else mode
        self._live = LiveDisplay(self.console, self._live_metrics, clock=clock) if self._mode == "live" else None
        self._clock = clock
        self._exit = ExitStack()
        self._progress: TrainingProgress | None = None

    def __enter__(self) -> "RunConsole":
        """Show warnings as lines from now on."""
        self._exit.enter_context(show_warnings(self._warn))
        self._exit.callback(self._tell_silenced)
        if self._live is not None:
            self._exit.callback(self._live.leave, self._tell)
        self._exit.callback(self._stop_progress)
        if self._no_screen:
            self._warn("note", "--live needs a terminal to draw on, and there is none; the output is plain lines.")
        return self

    def __exit__(self, *error: object) -> None:
        """Take the bar or the screen away and let warnings go where they went before."""
        self._exit.close()

    def sinks(self) -> list[MetricSink]:
        """Return the sinks that belong to the display: the table at every SNAPSHOT, or what the screen shows."""
        sinks: list[MetricSink] = [self._numbers] if self._numbers.metrics and self._mode != "none" else []
        if self._live is not None:
            sinks.append(self._live)
        elif self._mode == "normal":
            table_sink: type[Any] = SinkRegistry.get("console")
            sinks.append(table_sink(console=self.console, first=self._live_metrics))
        return sinks

    def strategy_started(self, run: RunInfo, task: TrainingTask, hooks: Sequence[TrainingHook]) -> Progress:
        """Show what is about to be trained, and start the bar or draw the screen."""
        self._print(tables.strategy_header(run, task, [hook.name for hook in hooks]))
        if self._mode == "none":
            return NoProgress()
        self._stop_progress()
        view: View
        if self._live is not None:
            self._live.open()
            view = self._live
        elif self.console.is_interactive:
            view = BarView(self.console, run.strategy, transient=self._mode == "normal")
        else:
            view = LineView(self.console, run.strategy, transient=self._mode == "normal", clock=self._clock)
        self._progress = TrainingProgress(
            view,
            unit=run.loop,
            length=task.length,
            steps_per_epoch=len(task.loader),
            clock=self._clock,
            chosen=self._numbers.texts,
        )
        return self._progress

    def strategy_ended(self, summary: Mapping[str, Any]) -> None:
        """Take the bar away and say how the strategy ended."""
        if self._live is not None:
            self._live.board.results.append(summary)
        self._stop_progress()
        self._print(tables.result_line(summary))
        for hook, rows in summary["hook_tables"].items():
            self._print(tables.hook_table(hook, rows, self.console.width))
        if summary["sample"]:
            self._print(tables.sample_text(summary["sample"]))

    def ended(self, summaries: Sequence[Mapping[str, Any]]) -> None:
        """Compare the strategies and say where the results lie."""
        if self._live is not None:
            self._live.leave(self._tell)
        if len(summaries) > 1:
            rows = tables.comparison_rows(summaries, self._compared_to)
            self._print(tables.comparison_table(rows, self.console.width))
        self._print(tables.results_line(summaries))

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
                self.console.print(shown)
        except OSError:  # the pipe is closed or the terminal gone: there is nobody to tell
            self._mode = "none"

    def _warn(self, label: Label, sentence: str) -> None:
        notice = Notice(label, sentence)
        self.notices.append(notice)
        if self._live is not None:
            self._live.board.notices.append(notice)
        self._print(notice.text())

    def _stop_progress(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()

    def _tell_silenced(self) -> None:
        """Tell in the end what the silent display did not: no warning is lost."""
        if self._mode == "silent":
            for notice, count in Counter(self.notices).items():
                self._tell(notice.text(f" ({count} times)" if count > 1 else ""))
