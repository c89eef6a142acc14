"""What hooks cost: samples sent through the model always, time and memory by section with ``--profile-hooks``."""

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
from ..state import reset_memory_peak

Result = TypeVar("Result")
MEASURED_FIRST, MEASURED_EVERY = 10, 25
"""Memory is measured at a hook's first calls and at every so many later ones: that takes longer than a small hook."""
STATUS = Path("/proc/self/status")


@dataclass
class Profiler:
    """Adds up wall-clock seconds and calls by section name; switched off it only counts what goes through the model."""

    enabled: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    caller: str = ""
    """The hook whose call is under way."""
    samples: dict[str, dict[str, int]] = field(default_factory=dict)
    """Samples that hooks sent through the model, by hook and kind of pass."""
    state_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time the body under ``name``."""
        if not self.enabled:
            yield
            return
        begin = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - begin
            self.calls[name] = self.calls.get(name, 0) + 1

    def call(self, name: str, function: Callable[[], Result], state_of: Callable[[], Mapping[str, Any]]) -> Result:
        """Call a hook's ``function``, timed; at some calls measure its peak of memory, and what it then remembers."""
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
                before, read_peak = memory
                self.peak_bytes[name] = max(read_peak() - before, self.peak_bytes.get(name, 0))
        tensors = [leaf for leaf in tree_leaves(state_of()) if isinstance(leaf, Tensor)]
        kept = {leaf.untyped_storage().data_ptr(): leaf.nbytes for leaf in tensors}
        self.state_bytes[name] = max(sum(kept.values()), self.state_bytes.get(name, 0))
        return result

    def count_samples(self, kind: str, batch: Any) -> None:
        """Count the samples of a batch for the hook under way.

        ``kind`` is the pass: forward, forward_backward, hessian_product, or second_backward (a Hessian-vector product
        where the graph of the gradient was there).
        """
        counts = self.samples.setdefault(self.caller, {})
        counts[kind] = counts.get(kind, 0) + rows(batch)

    def report(self) -> dict[str, dict[str, float]]:
        """Return calls, seconds and, for hooks, bytes by section, the dearest first.

        ``state_bytes`` is the most that a hook remembered between calls, ``peak_bytes`` the most by which memory grew
        during one (see :func:`start_peak_measurement`).
        """
        order = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)
        sizes = {"state_bytes": self.state_bytes, "peak_bytes": self.peak_bytes}
        return {
            name: {"seconds": self.seconds[name], "calls": self.calls[name]}
            | {key: found[name] for key, found in sizes.items() if name in found}
            for name in order
        }


def start_peak_measurement() -> tuple[int, Callable[[], int]] | None:
    """Start to measure the peak of memory again.

    Returns the bytes in use and a function that returns the peak since, or ``None`` where it cannot be measured.

    On an accelerator that counts it, that is memory allocated for tensors. On the CPU it is resident memory of the
    process, which Linux lets a process measure again (``clear_refs``); what glibc's allocator has in reserve is given
    back first, and with another allocator does not show, so that small needs may read as 0. Elsewhere nothing is
    measured.
    """
    if torch.accelerator.is_available():
        return reset_memory_peak()
    try:
        with suppress(AttributeError):  # a call that only glibc has
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(), peak_resident_bytes
    except OSError:
        return None


def peak_resident_bytes() -> int:
    """Return the largest resident memory of this process so far, in bytes.

    Linux' ``ru_maxrss`` starts from that of the parent process, ``VmHWM`` does not.
    """
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
