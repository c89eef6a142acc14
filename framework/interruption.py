"""The end of a command at Ctrl-C or SIGTERM while no run is in progress: one sentence, without a traceback.

By default Ctrl-C raises ``KeyboardInterrupt`` at any line. During the import of torch, which takes seconds, this leaves
a partly initialised library, with which the shutdown of the interpreter prints tracebacks or crashes. Until the command
starts its work, nothing has to be saved or closed, so the process ends at once. This module is imported first, so it
imports nothing slow.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

_SENTENCES = {signal.SIGINT: "interrupted.", signal.SIGTERM: "stopped by SIGTERM."}
_DEFAULTS: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


def end_process(number: int, frame: FrameType | None = None) -> NoReturn:
    """Print a sentence, and end the process with status 128 + the number of the signal, without any clean-up."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or interrupted in a write
            stream.flush()
    if os.environ.get("RANK", "0") == "0":  # of several processes only the first one prints
        with suppress(OSError):
            os.write(2, f"loopscope: {_SENTENCES[signal.Signals(number)]}\n".encode())
    os._exit(128 + number)


def end_at_signals() -> None:
    """Let Ctrl-C and SIGTERM end the process, unless they are ignored or the program handles them."""
    if threading.current_thread() is threading.main_thread():
        for number, default in _DEFAULTS.items():
            if signal.getsignal(number) == default:
                signal.signal(number, end_process)


def raise_at_ctrl_c() -> None:
    """Let Ctrl-C raise ``KeyboardInterrupt`` again, once a command does work that it must clean up."""
    raise_by_default(signal.SIGINT)


def raise_by_default(*numbers: signal.Signals) -> None:
    """Undo :func:`end_at_signals`, for all signals or for some."""
    for number in numbers or _DEFAULTS:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) == end_process:
            signal.signal(number, _DEFAULTS[number])


def is_partly_imported(package: str) -> bool:
    """Return whether the import of a package was interrupted, or is in progress."""
    module = sys.modules.get(package)
    if module is None:
        return any(name.startswith(f"{package}.") for name in sys.modules)
    return bool(getattr(module.__spec__, "_initializing", False))


def ignore_signal(number: int, frame: FrameType | None) -> None:
    """Do nothing at a signal; unlike ``SIG_IGN``, processes that are started do not inherit it."""
