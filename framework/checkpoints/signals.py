"""Signals: finish the step, write a checkpoint, and end or go on; a second one ends at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..errors import LoopscopeError

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StoppedError(LoopscopeError):
    """A signal ended the run, after the step that was under way."""

    def __init__(self, number: int) -> None:
        super().__init__(f"Stopped by {signal.Signals(number).name}.")
        self.number = number

    @property
    def status(self) -> int:
        """The exit status that tells of the signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.number


class Signals:
    """Remembers what signals ask for until the run asks, between two steps."""

    def __init__(self) -> None:
        self.stop: int | None = None
        self._asked = False
        self._earlier: dict[int, Any] = {}

    def take_checkpoint_request(self) -> bool:
        """Tell, once, whether a checkpoint was asked for."""
        asked, self._asked = self._asked, False
        return asked

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch SIGINT, SIGTERM and SIGUSR1 in the body; the handlers from before are put back whatever happens.

        Only Python's main thread receives signals: elsewhere nothing is caught. A signal that was ignored stays so.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            for number in (*STOPPING, signal.SIGUSR1):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._earlier[number] = signal.signal(number, self._received)
            yield
        finally:
            self._put_back()

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._asked = True
        elif self.stop is None:
            self.stop = number
        else:
            self._put_back()
            signal.raise_signal(number)

    def _put_back(self) -> None:
        while self._earlier:
            number, handler = self._earlier.popitem()
            if handler is not None:  # one that was not made in Python cannot be put back
                signal.signal(number, handler)
