"""How much memory a piece of work takes at its peak, on the accelerator or, under Linux, in the process."""

import ctypes
import resource
from contextlib import suppress
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures the growth from :meth:`begin` to the highest point since, in bytes.

    On an accelerator that is memory allocated for tensors. On the CPU it is resident memory of the process, which
    Linux lets a process measure anew (``clear_refs``); what glibc's allocator has in reserve is given back first, and
    with another allocator does not show, so that small needs may read as 0. Elsewhere nothing is measured.
    """

    def __init__(self) -> None:
        self._on_accelerator = torch.accelerator.is_available()
        self._before: int | None = None

    def begin(self) -> None:
        """Start a measurement."""
        if self._on_accelerator:
            torch.accelerator.reset_peak_memory_stats()
            self._before = torch.accelerator.memory_allocated()
            return
        try:
            _give_back_reserve()
            CLEAR.write_text("5")
            self._before = _resident()
        except OSError:
            self._before = None

    def growth(self) -> int | None:
        """Return the growth since then, or ``None`` where it cannot be measured."""
        if self._before is None:
            return None
        peak = torch.accelerator.max_memory_allocated() if self._on_accelerator else peak_resident()
        return max(0, peak - self._before)


def _give_back_reserve() -> None:
    """Hand freed memory to the system, as glibc does when asked; other C libraries have no such call."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_resident() -> int:
    """Return the largest resident memory of this process so far, in bytes.

    Linux' ``ru_maxrss`` starts from that of the parent process, ``VmHWM`` does not.
    """
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
