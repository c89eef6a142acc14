"""Preservation of the caller's random streams while loopscope imports packages and sets up a run."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

QUIET_PACKAGES = {
    *("loopscope", "rich", "tqdm", "wandb", "mlflow", "tensorboard", "trackio", "torch", "multiprocessing", "logging"),
    *("ipykernel", "IPython", "zmq", "jupyter_client", "tornado", "debugpy", "pydevd"),
}
"""Packages whose threads draw no numbers, such as those of progress bars, loggers, notebooks and data loaders."""
_QUIET_THREADS: "WeakSet[threading.Thread]" = WeakSet()


@contextmanager
def preserved_streams() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch after the body.

    Some packages draw random numbers when they are imported (``rich.style`` and ``lightning`` use Python's generator),
    and plug-ins may. NumPy and torch are not imported here, since the generator of a package that is not loaded yet
    cannot have been seeded. Accelerators are not included, since no import draws from them;
    :class:`~loopscope.state.RandomStreams` handles them. If a thread of the script is running, it has drawn the
    numbers rather than an import, so nothing is restored.
    """
    # Imported here, since importing loopscope must be quick: Ctrl-C is handled by code that is imported after it.
    import random

    numpy: Any = sys.modules.get("numpy.random")
    torch: Any = sys.modules.get("torch.random")
    python_state = random.getstate()
    # legacy=False, since the legacy tuple exists only for MT19937: with another bit generator NumPy warns.
    numpy_state = None if numpy is None else numpy.get_state(legacy=False)
    torch_state = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        if not threads_of_script():
            random.setstate(python_state)
            if numpy_state is not None:
                numpy.set_state(numpy_state)
            if torch_state is not None:
                torch.set_rng_state(torch_state)


def threads_of_script() -> list[str]:
    """Return the names of the other running threads, without those of packages that draw no random numbers."""
    others = {*threading.enumerate()} - {threading.current_thread(), threading.main_thread()}
    return [thread.name for thread in others if thread not in _QUIET_THREADS and not _is_quiet(thread)]


def _is_quiet(thread: threading.Thread) -> bool:
    places = (type(thread), getattr(thread, "_target", None))
    is_quiet = not QUIET_PACKAGES.isdisjoint(getattr(place, "__module__", "").partition(".")[0] for place in places)
    if is_quiet:
        _QUIET_THREADS.add(thread)
    return is_quiet
