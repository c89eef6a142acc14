"""Signals that end a run between two steps or request a checkpoint."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..errors import LoopscopeError

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StoppedError(LoopscopeError):
    """A signal ended the run after the step in progress."""

    def __init__(self, number: int) -> None:
        super().__init__(f"Stopped by {signal.Signals(number).name}.")
        self.number = number

    @property
    def status(self) -> int:
        """The exit status for the signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.number


class _TerminatedError(KeyboardInterrupt):
    """A signal, its argument, was received while no step was in progress."""


class Signals:
    """Records signals until the run handles them between two steps; outside of training they end it at once.

    Args:
        stopping: the signals that end the run, by default SIGINT and SIGTERM.
        saving: the signals that request a checkpoint, by default SIGUSR1.
    """

    def __init__(
        self, stopping: Sequence[signal.Signals] = STOPPING, saving: Sequence[signal.Signals] = (signal.SIGUSR1,)
    ) -> None:
        self._stopping, self._saving = stopping, saving
        self.stop: int | None = None
        self.checkpoint_requested = False
        """Whether a checkpoint was requested since this was last set to ``False``."""
        self._previous_handlers: dict[int, Any] = {}

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let SIGTERM interrupt the body as Ctrl-C does, and record SIGUSR1, from the first strategy to the last.

        Raises:
            StoppedError: after SIGTERM, in place of the ``KeyboardInterrupt`` that ended the body.
        """
        interrupting = [number for number in self._stopping if number != signal.SIGINT]  # Python itself handles that
        try:
            with _handling(
                dict.fromkeys(interrupting, self._interrupted) | dict.fromkeys(self._saving, self._received)
            ):
                yield
        except _TerminatedError as error:
            raise StoppedError(*error.args) from None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Record SIGINT, SIGTERM and SIGUSR1 during the body, and restore the previous handlers after it.

        Only Python's main thread receives signals, so in other threads this does nothing. Ignored signals stay ignored.
        """
        with _handling(dict.fromkeys((*self._stopping, *self._saving), self._received)) as self._previous_handlers:
            yield

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        raise _TerminatedError(number)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number in self._saving:
            self.checkpoint_requested = True
        elif self.stop is None:
            self.stop = number
        elif number in STOPPING:  # a second signal of a user acts at once
            _restore_handlers(self._previous_handlers)
            signal.raise_signal(number)


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[dict[int, Any]]:
    """Install handlers for signals that are not ignored, yield the previous ones, and restore them after the body."""
    previous_handlers: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous_handlers[number] = signal.signal(number, handler)
        yield previous_handlers
    finally:
        _restore_handlers(previous_handlers)


def _restore_handlers(handlers: dict[int, Any]) -> None:
    while handlers:
        number, handler = handlers.popitem()
        if handler is not None:  # None is a handler that was not installed from Python, which Python cannot restore
            signal.signal(number, handler)
