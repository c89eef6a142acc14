"""The full-screen display of a session: what it shows, when it is drawn, and what is told after it."""

import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import IO, Any, NamedTuple

from rich.console import Console, RenderableType
from rich.text import Text

from .board import Board, BoardSink, Groups
from .frame import Glyphs, frame
from .kept_output import output_kept
from .notices import Notice
from .progress import SECONDS_BETWEEN_UPDATES, Position, View
from .terminal import Screen

LARGEST_SHARE = 0.02
MOST_KEPT = 1_000_000
ASCII = Glyphs(bar="=", rule="-", wall="|")


class Printed(NamedTuple):
    """Something that was printed while the screen was on, and where."""

    stream: IO[str]
    text: str


class LiveDisplay(View):
    """The screen of all strategies of a session; drawn by the loop's own calls, never by a thread.

    A drawing is due half a second after the one before, and later where drawing is slow: it takes at most 2 % of the
    time. What is told or printed meanwhile is kept and told by :meth:`close`, in its order.

    Args:
        console: the console of a terminal.
        live_metrics: full names by group, for the sidebar.
        clock: the time in seconds.
    """

    def __init__(self, console: Console, live_metrics: Groups, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, "", transient=True, clock=clock)
        self.board = Board(live_metrics)
        self._screen = Screen(console)
        self._glyphs = Glyphs() if console.encoding.startswith("utf") else ASCII
        self._on = ExitStack()
        self._is_on = False
        self._position: Position | None = None
        self._due = clock()
        self._transcript: list[RenderableType | Printed] = []
        self._kept = self._dropped = 0

    def sink(self) -> BoardSink:
        """Return the sink through which the metrics of one strategy come."""
        return BoardSink(self.board, self.draw_if_due)

    def open(self) -> None:
        """Take the terminal, if that has not been done."""
        if not self._is_on:
            self._is_on = True
            self._screen.open()
            self._on.enter_context(output_kept(self._keep))
        self._due = self.clock()
        self._position = None
        self.draw_if_due()

    @property
    def is_on(self) -> bool:
        """Tell whether the terminal is taken: what is to be said must wait."""
        return self._is_on

    def show(self, position: Position) -> None:
        """Note how far the strategy has come, and draw it if a drawing is due."""
        self._position = position
        self.draw_if_due()

    def finish(self, position: Position | None) -> None:
        """Draw how far the strategy came."""
        if position is not None:
            self._position, self._due = position, self.clock()
            self.draw_if_due()

    def ended(self, summary: Mapping[str, Any]) -> None:
        """Add a strategy to the results."""
        self.board.results.append(summary)

    def noticed(self, notice: Notice) -> None:
        """Show a notice with the next drawing."""
        self.board.notices.append(notice)

    def tell_later(self, shown: RenderableType) -> None:
        """Keep something to be told once the terminal is given back."""
        self._transcript.append(shown)

    def draw_if_due(self) -> None:
        """Draw, unless the last drawing was a moment ago."""
        begin = self.clock()
        if not self._is_on or begin < self._due:
            return
        self._due = math.inf
        try:
            self._screen.paint(lambda width, height: frame(self.board, self._position, width, height, self._glyphs))
        except Exception as error:
            warnings.warn(f"The live display failed and is switched off: {type(error).__name__}: {error}", stacklevel=2)
            return
        end = self.clock()
        self._due = end + max(SECONDS_BETWEEN_UPDATES, (end - begin) / LARGEST_SHARE)

    def close(self, tell: Callable[[RenderableType], None]) -> None:
        """Give the terminal back and tell what was kept."""
        self._is_on = False
        self._on.close()
        self._screen.close()
        if self._dropped:
            tell(Text(f"{self._dropped:,} characters that were printed before are left out here.", style="dim"))
        transcript, self._transcript, self._kept, self._dropped = self._transcript, [], 0, 0
        for item in transcript:
            if isinstance(item, Printed):
                with suppress(OSError):  # the terminal is gone
                    item.stream.write(item.text)
                    item.stream.flush()
            else:
                tell(item)

    def _keep(self, stream: IO[str], text: str) -> None:
        self.board.printed_lines += text.count("\n")
        self._transcript.append(Printed(stream, text))
        self._kept += len(text)
        while self._kept > MOST_KEPT:
            oldest = next(item for item in self._transcript if isinstance(item, Printed))
            self._transcript.remove(oldest)
            self._kept -= len(oldest.text)
            self._dropped += len(oldest.text)
