"""What a notebook shows while a cell runs: outputs that change in place, where a terminal has a bar and a log lines."""

from typing import Any

from rich.console import Console, RenderableType
from rich.jupyter import JupyterMixin
from rich.segment import Segments

from .progress import Position, progress_line


class NotebookOutput(JupyterMixin):
    """One output of the cell that runs, which shows the newest of what it is given."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: RenderableType = ""
        self._handle: Any = None

    def __rich__(self) -> RenderableType:
        """Return what is shown."""
        return self._shown

    def update(self, shown: RenderableType) -> None:
        """Show something in place of what was shown before."""
        from IPython.display import display

        self._shown = Segments(self._console.render(shown))  # where names give no commands
        if self._handle is None:
            self._handle = display(self, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(self)


class NotebookView:
    """A bar in an output of the cell."""

    def __init__(self, console: Console, label: str) -> None:
        self._output, self._width, self._label = NotebookOutput(console), console.width, label

    def show(self, position: Position | None) -> None:
        """Draw the bar anew."""
        self._output.update(progress_line(position, self._width, self._label))

    def finish(self, position: Position | None) -> None:
        """Draw it for the last time."""
        if position is not None:
            self.show(position)
