"""Output of a notebook cell that is updated in place."""

from typing import Any

from rich.console import Console, RenderableType
from rich.jupyter import JupyterMixin
from rich.segment import Segments


class NotebookOutput(JupyterMixin):
    """One output of the running cell, which shows its newest content."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: RenderableType = ""
        self._handle: Any = None

    def __rich__(self) -> RenderableType:
        """Return the content."""
        return self._shown

    def update(self, shown: RenderableType) -> None:
        """Replace the content."""
        from IPython.display import display

        self._shown = Segments(self._console.render(shown))  # with control characters escaped
        if self._handle is None:
            self._handle = display(self, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(self)
