"""Console sink: the newest metrics as a line or a table at every SNAPSHOT."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from loopscope.console import Board, Groups, NotebookOutput, make_console, newest_table, snapshot_line
from loopscope.hooks import Alert, HookPoint, MetricSink, SinkRegistry

from .record import plain

if TYPE_CHECKING:
    from loopscope.hooks import RunInfo
    from rich.console import Console


@SinkRegistry.register
class ConsoleSink(MetricSink):
    """Show the newest metrics at every SNAPSHOT and at the end of a strategy.

    On a terminal as a table of metrics of all hook points, but none of single parameters (names with three or more
    parts). It is at most as high as the terminal, or thirty lines: first the metrics of ``first``, then equally many
    metrics of each hook, each with an arrow for its last three values; a series shows its mean since the last table.
    Other outputs, and all without ``tables``, get one line with the metrics of ``first``, series as means, and the
    number of alerts since the last line; with ``tables``, if none of these has a value, the first other metrics. In a
    notebook a table or line replaces the previous one.

    Args:
        console: the output; by default standard output.
        first: full names of metrics by group; by default those of ``training_metrics``.
        tables: show tables on a terminal and in a notebook.
        recorded: whether another sink keeps all metrics.
        shown: called after a line was printed.
    """

    draws: ClassVar[bool] = False
    name: ClassVar[str] = "console"
    keeps: ClassVar[bool] = False

    def __init__(
        self,
        *,
        console: "Console | None" = None,
        first: Groups | None = None,
        tables: bool = True,
        recorded: bool = False,
        shown: Callable[[], None] | None = None,
    ) -> None:
        self._console = console or make_console()
        self._tables, self._recorded, self._shown = tables, recorded, shown
        self._board = Board(first or {})

    def set_run_context(self, run: "RunInfo") -> None:
        """Start a strategy."""
        self._board.start(run)
        self._output = NotebookOutput(self._console)

    def position(self) -> dict[str, Any]:
        """Return the values since the last table, and the values that it showed."""
        return {name: plain(value) for name, value in self._board.position().items()}

    def resume(self, run: "RunInfo", position: Mapping[str, Any]) -> None:
        """Restore the values for the next table."""
        self._board.resume(run, position)

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Store metrics for the next table."""
        if self._board.run is None:
            raise RuntimeError("ConsoleSink has no run: call set_run_context(run) before emit.")
        self._board.take(metrics, epoch, step)

    def alert(self, alerts: Sequence[Alert]) -> None:
        """Count alerts."""
        self._board.count_alerts(alerts)

    def snapshot(self, epoch: int, step: int) -> None:
        """Show the stored metrics."""
        self._board.epoch, self._board.step = epoch, step
        self._show()

    def close(self, status: str) -> None:
        """Show the metrics since the last table."""
        self._show()
        self._board.run = None

    def _show(self) -> None:
        board, console = self._board, self._console
        if board.run is None or not board.news():
            return
        line = snapshot_line(board, recorded=self._recorded, others=self._tables)
        if console.is_jupyter:
            table = newest_table(board, console.width, 0, recorded=self._recorded) if self._tables else line
            if table:
                self._output.update(table)
        elif self._tables and console.is_interactive:
            console.print(newest_table(board, console.width, console.height, recorded=self._recorded))
        elif line:
            console.out(line, highlight=False)
            if self._shown is not None:
                self._shown()
        board.mark_shown()
