"""Preservation of the caller's random streams while loopscope imports packages and sets up a run."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def preserved_streams() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch after the body.

    Some packages draw random numbers when they are imported (``rich.style`` and ``lightning`` use Python's generator),
    and plug-ins may. NumPy and torch are not imported here, since the generator of a package that is not loaded yet
    cannot have been seeded. Accelerators are not included, since no import draws from them;
    :class:`~loopscope.state.RandomStreams` handles them. If another thread is running, it has drawn the numbers rather
    than an import, so nothing is restored.
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
        if threading.active_count() == 1:
            random.setstate(python_state)
            if numpy_state is not None:
                numpy.set_state(numpy_state)
            if torch_state is not None:
                torch.set_rng_state(torch_state)
