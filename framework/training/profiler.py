"""Cost of hooks: samples that they send through the model, and time and memory with ``--profile-hooks``."""

import ctypes
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..data import rows
from .step_clock import StepClock

Result = TypeVar("Result")
MEASURED_FIRST, MEASURED_EVERY = 10, 25
"""Memory is measured at a hook's first calls and at every 25th later one, because a measurement costs more than a small
hook."""
STATUS = Path("/proc/self/status")


@dataclass
class Profiler:
    """Sums wall-clock seconds and calls by section name; a disabled profiler only counts samples."""

    enabled: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    caller: str = ""
    """Name of the hook that is being called."""
    samples: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of samples that hooks sent through the model, by hook and kind of pass."""
    state_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    clock: StepClock = field(default_factory=StepClock)
    """The time of the training by phase, of which that of hooks is one."""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time the body under ``name``."""
        if not self.enabled:
            yield
            return
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start
            self.calls[name] = self.calls.get(name, 0) + 1

    def call(self, name: str, function: Callable[[], Result], state_of: Callable[[], Mapping[str, Any]]) -> Result:
        """Call a hook's ``function`` and time it; some calls also measure its peak memory and the size of its state."""
        calls = self.calls.get(name, 0)
        if calls >= MEASURED_FIRST and calls % MEASURED_EVERY:
            with self.section(name):
                return function()
        memory = start_peak_measurement()
        try:
            with self.section(name):
                result = function()
        finally:
            if memory is not None:
                bytes_before, read_peak = memory
                self.peak_bytes[name] = max(read_peak() - bytes_before, self.peak_bytes.get(name, 0))
        tensors = [leaf for leaf in tree_leaves(state_of()) if isinstance(leaf, Tensor)]
        # Tensors that share a storage are counted once, by its address.
        bytes_by_storage = {leaf.untyped_storage().data_ptr(): leaf.nbytes for leaf in tensors}
        self.state_bytes[name] = max(sum(bytes_by_storage.values()), self.state_bytes.get(name, 0))
        return result

    def count_samples(self, kind: str, batch: Any) -> None:
        """Count the samples of a batch for the hook that is being called.

        ``kind`` is the kind of pass: forward, forward_backward, hessian_product, or second_backward (a Hessian-vector
        product with an existing graph of the gradient).
        """
        counts = self.samples.setdefault(self.caller, {})
        counts[kind] = counts.get(kind, 0) + rows(batch)

    def report(self) -> dict[str, dict[str, float]]:
        """Return calls, seconds and, for hooks, bytes by section, most expensive first.

        ``state_bytes`` is the largest size of a hook's state between calls, ``peak_bytes`` the largest growth of memory
        during a call (see :func:`start_peak_measurement`).
        """
        order = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)
        sizes = {"state_bytes": self.state_bytes, "peak_bytes": self.peak_bytes}
        return {
            name: {"seconds": self.seconds[name], "calls": self.calls[name]}
            | {key: by_name[name] for key, by_name in sizes.items() if name in by_name}
            for name in order
        }


def start_peak_measurement() -> tuple[int, Callable[[], int]] | None:
    """Reset the peak of memory, and start a new measurement.

    Returns the bytes in use and a function that returns the peak since then, or ``None`` if the platform cannot measure
    it.

    On an accelerator, this is the memory allocated for tensors. On a CPU, it is the resident memory of the process,
    whose peak Linux can reset (``clear_refs``). glibc's allocator releases its reserve first; with another allocator,
    allocations from the reserve are not visible, so small amounts can be measured as 0.
    """
    if torch.accelerator.is_available():
        try:
            torch.accelerator.reset_peak_memory_stats()
            return torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # a backend that does not count memory
            return None
    try:
        with suppress(AttributeError):  # only glibc has malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
        # 5 resets the peak of the resident memory; the second number of statm is the resident memory in pages.
        Path("/proc/self/clear_refs").write_text("5")
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(), peak_resident_bytes
    except OSError:
        return None


def peak_resident_bytes() -> int:
    """Return the largest resident memory of this process so far, in bytes.

    On Linux, ``ru_maxrss`` includes the peak of the parent process, ``VmHWM`` does not.
    """
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_memory() -> dict[str, int]:
    """Return the largest memory so far: ``host``, resident in this process, and ``device``, of tensors on a GPU."""
    peaks = {"host": peak_resident_bytes()}
    if torch.cuda.is_available():
        peaks["device"] = torch.cuda.max_memory_allocated()
    return peaks
