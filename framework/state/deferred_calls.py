"""Functions that Python calls later: profilers, tracers, callbacks of the garbage collector, handlers of timer signals.

A hook that leaves such a function could change the run between two checks. The readers are implemented in C, like those
of :mod:`.flags`; these functions are not part of a digest, since they belong to the program, not to the run.
"""

import gc
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from .parts import Part, StateObjects, Watched
from .values import LIBRARIES

# signal.getsignal converts to an enumeration in Python, which takes 1 µs per call; the C function below it takes 0.03.
_getsignal: Callable[[int], Any] = import_module("_signal").getsignal
_TIMERS = {"SIGALRM": "ITIMER_REAL", "SIGVTALRM": "ITIMER_VIRTUAL", "SIGPROF": "ITIMER_PROF"}
# Windows has no timer signals.
_HANDLED = {getattr(signal, name): timer for name, timer in _TIMERS.items() if hasattr(signal, name)}
_READERS: tuple[Callable[[], Any], ...] = (
    sys.getprofile,
    sys.gettrace,
    partial(tuple, gc.callbacks),
    *[partial(_getsignal, int(number)) for number in _HANDLED],
)


class DeferredCalls(Part):
    """The functions that Python calls later."""

    name = "deferred calls"
    restored_first = True  # a profiler or a tracer would be called during the restoration of other parts

    def keep(self, state: StateObjects, owners: list[Tensor]) -> tuple[Any, ...]:
        """Return the functions."""
        return _read()

    def restore(self, state: StateObjects, owners: list[Tensor], kept: Sequence[Any]) -> None:
        """Install the functions again."""
        _install(kept)

    def watch(self, state: StateObjects) -> Watched:
        """Compare the functions."""
        return Watched(getters=_READERS, differences=_differences, restore=_install)


def _read() -> tuple[Any, ...]:
    return tuple([read() for read in _READERS])


def _differences(previous: Sequence[Any]) -> list[str]:
    """Name what differs from earlier readings, apart from functions of libraries."""
    labels = ["sys.setprofile", "sys.settrace", "gc.callbacks", *[f"handler of {number.name}" for number in _HANDLED]]
    pairs = zip(labels, previous, _read(), strict=True)
    return [label for label, old, new in pairs if _of_user_code(old) != _of_user_code(new)]


def _of_user_code(reading: Any) -> Any:
    """Return a reading without the functions of libraries.

    A debugger that is started within a hook keeps its tracer, and some packages install callbacks when they are
    imported; neither changes the run.
    """
    if isinstance(reading, tuple):
        return [function for function in reading if _of_user_code(function) is not None]
    module = sys.modules.get(str(getattr(reading, "__module__", None)))
    is_of_library = str(getattr(module, "__file__", None)).startswith(LIBRARIES)
    return None if is_of_library and not isinstance(reading, signal.Handlers) else reading


def _install(readings: Sequence[Any]) -> None:
    """Install the functions of earlier readings again, where another is installed now."""
    if not _differences(readings):
        return
    profiler, tracer, callbacks, *handlers = readings
    sys.setprofile(profiler)
    sys.settrace(tracer)
    gc.callbacks[:] = callbacks
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may install handlers
    for (number, timer), handler in zip(_HANDLED.items(), handlers, strict=True):
        if signal.getsignal(number) != handler and handler is not None:
            if handler == signal.SIG_DFL:  # which would end the process when the timer expires
                signal.setitimer(getattr(signal, timer), 0)
            signal.signal(number, handler)
