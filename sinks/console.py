"""The newest metrics as one table at every SNAPSHOT."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from loopscope.console import Board, Groups, NotebookOutput, make_console, newest_table, snapshot_line
from loopscope.hooks import Alert, HookPoint, MetricSink, RunInfo, SinkRegistry

from .record import plain

if TYPE_CHECKING:
    from rich.console import Console


@SinkRegistry.register
class ConsoleSink(MetricSink):
    """Show the newest metrics as a table at every SNAPSHOT, and what is left at the end of a strategy.

    They come from every point, without those of single parameters (three or more parts of a path). On a terminal the
    table has at most its height, or thirty lines: the metrics of ``first`` on top, then as many of each hook as of
    every other, with an arrow for the last three values, and of a series the mean since the last table. In a notebook
    it stands in the place of the one before. Elsewhere it is a line with the metrics of ``first``, a series by its
    mean, and how many numbers and alerts came since the last one.

    Args:
        console: where to show it; standard output by default.
        first: full names of metrics by group; ``training_metrics`` where there are none.
        recorded: whether another sink keeps all metrics.
        told: called after a line.
    """

    name: ClassVar[str] = "console"
    keeps: ClassVar[bool] = False

    def __init__(
        self,
        *,
        console: "Console | None" = None,
        first: Groups | None = None,
        recorded: bool = False,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        self._console = console or make_console()
        self._recorded, self._told = recorded, told
        self._board = Board(first or {})

    def set_run_context(self, run: RunInfo) -> None:
        """Begin a strategy."""
        self._board.begin(run)
        self._output = NotebookOutput(self._console)

    def position(self) -> dict[str, Any]:
        """Return what was gathered since the last table, and what that table showed."""
        return {name: plain(value) for name, value in self._board.position().items()}

    def resume(self, run: RunInfo, position: Mapping[str, Any]) -> None:
        """Go on gathering for the next table."""
        self._board.resume(run, position)

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Gather metrics."""
        if self._board.run is None:
            raise RuntimeError("ConsoleSink shows the metrics of a run: set_run_context(run) comes before emit.")
        self._board.take(metrics, epoch, step)

    def alert(self, alerts: Sequence[Alert]) -> None:
        """Count alerts."""
        self._board.warned(alerts)

    def snapshot(self, epoch: int, step: int) -> None:
        """Show what was gathered."""
        self._board.epoch, self._board.step = epoch, step
        self._show()

    def close(self, status: str) -> None:
        """Show what was gathered since the last table."""
        self._show()
        self._board.run = None

    def _show(self) -> None:
        board, console = self._board, self._console
        if board.run is None or not board.news():
            return
        if console.is_jupyter:
            self._output.update(newest_table(board, console.width, 0, recorded=self._recorded))
        elif console.is_interactive:
            console.print(newest_table(board, console.width, console.height, recorded=self._recorded))
        else:
            console.out(snapshot_line(board, recorded=self._recorded), highlight=False)
            self._told()
        board.is_told()
