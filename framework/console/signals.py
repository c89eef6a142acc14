"""What Ctrl-Z, SIGQUIT and a kill do while the terminal is taken: it is given back first."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NAMES = ("SIGTSTP", "SIGTERM", "SIGQUIT", "SIGHUP")
SIGNALS = [number for number in signal.Signals if number.name in NAMES]


@contextmanager
def terminal_given_back_on_signals(give_back: Callable[[], None]) -> Iterator[None]:
    """Call ``give_back`` before signals that stop or end the process; then they do what they would have done.

    Signals for which somebody has a handler are left alone, and so are all of them outside the main thread. A forked
    process gives nothing back: the terminal is its parent's.
    """
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            give_back()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, handle)  # the process was stopped, and goes on

    main = threading.current_thread() is threading.main_thread()
    ours = [number for number in SIGNALS if main and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is handle:
                signal.signal(number, signal.SIG_DFL)
