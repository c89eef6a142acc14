"""What a notebook shows while a cell runs: an output that changes in place, where a terminal has lines."""

from typing import Any

from rich.console import Console, RenderableType
from rich.jupyter import JupyterMixin
from rich.segment import Segments


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
