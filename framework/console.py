"""What a run shows while it goes: headers, a progress bar, warnings, and the comparison at the end."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from framework.console_output import make_console
from framework.console_progress import BarView, LineView, TrainingProgress
from framework.console_tables import (
    comparison_rows,
    comparison_table,
    experiment_list,
    hook_list,
    hook_page,
    result_line,
    results_line,
    strategy_header,
)
from framework.contexts import RunInfo
from framework.display import Display
from framework.errors import RunNotice
from framework.hooks import TrainingHook
from framework.loops import NoProgress, Progress
from framework.metrics import MetricSink
from framework.registry import SinkRegistry
from framework.runner import ExperimentRunner
from framework.train_step import TrainingTask

Mode = Literal["normal", "silent", "none"]
Label = Literal["note", "warning"]
LABEL_STYLES: Mapping[Label, str] = {"note": "bold cyan", "warning": "bold yellow"}


@contextmanager
def show_warnings(show: Callable[[Label, str], None]) -> Iterator[None]:
    """Hand every warning to ``show`` as its label and its sentence, instead of printing where it was raised.

    A :class:`RunNotice` is information and labelled ``note``; every other warning is trouble and labelled ``warning``.
    """
    before = warnings.showwarning

    def shown(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        show("note" if issubclass(category, RunNotice) else "warning", " ".join(str(message).split()))

    warnings.showwarning = shown
    try:
        yield
    finally:
        warnings.showwarning = before


class RunConsole(Display):
    """The display of one session; a context manager that leaves the terminal as it was.

    Args:
        mode: ``normal`` shows everything, ``silent`` the progress bar alone, ``none`` nothing at all.
        console: where to show it; standard output by default.
        clock: the time in seconds.
    """

    def __init__(
        self, mode: Mode = "normal", *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or make_console()
        self.warnings: list[str] = []
        self._mode = mode
        self._clock = clock
        self._exit = ExitStack()
        self._progress: TrainingProgress | None = None

    def __enter__(self) -> "RunConsole":
        """Show warnings as lines from now on."""
        self._exit.enter_context(show_warnings(self._warn))
        self._exit.callback(self._stop_progress)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away and let warnings go where they went before."""
        self._exit.close()

    def sinks(self) -> list[MetricSink]:
        """Return the sinks that belong to the display: in normal mode the table at every SNAPSHOT."""
        table_sink: type[Any] = SinkRegistry.get("console")
        return [table_sink(console=self.console)] if self._mode == "normal" else []

    def strategy_started(self, run: RunInfo, task: TrainingTask, hooks: Sequence[TrainingHook]) -> Progress:
        """Show what is about to be trained, and start the bar."""
        self._print(strategy_header(run, task, [hook.name for hook in hooks]))
        if self._mode == "none":
            return NoProgress()
        view = BarView if self.console.is_interactive else LineView
        self._stop_progress()
        self._progress = TrainingProgress(
            view(self.console, run.strategy, transient=self._mode == "normal", clock=self._clock),
            unit="epoch" if run.loop == "epoch" else "step",
            length=task.length,
            steps_per_unit=len(task.loader) if run.loop == "epoch" else 1,
            clock=self._clock,
        )
        return self._progress

    def strategy_ended(self, summary: Mapping[str, Any]) -> None:
        """Take the bar away and say how the strategy ended."""
        self._stop_progress()
        self._print(result_line(summary))

    def ended(self, summaries: Sequence[Mapping[str, Any]]) -> None:
        """Compare the strategies and say where the results lie."""
        if len(summaries) > 1:
            self._print(comparison_table(comparison_rows(summaries)))
        self._print(results_line(summaries))

    def _print(self, shown: RenderableType) -> None:
        if self._mode != "normal":
            return
        if isinstance(shown, Text) and not self.console.is_interactive:
            self.console.out(shown.plain, highlight=False)
        else:
            self.console.print(shown)

    def _warn(self, label: Label, sentence: str) -> None:
        self.warnings.append(sentence)
        self._print(Text.assemble((f"{label}: ", LABEL_STYLES[label]), sentence))

    def _stop_progress(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()


def print_experiments(experiments: Sequence[type[ExperimentRunner[Any]]]) -> None:
    """Print the experiments with their strategies and presets."""
    make_console().print(experiment_list(experiments))


def print_hooks(hooks: Sequence[type[TrainingHook]]) -> None:
    """Print one line for each hook."""
    make_console().print(hook_list(hooks))


def print_hook(hook: type[TrainingHook]) -> None:
    """Print every metric and option of a hook."""
    make_console().print(hook_page(hook))
