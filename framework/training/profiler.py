"""What hooks cost: samples sent through the model always, time and memory by section with ``--profile-hooks``."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..data import rows
from .memory import PeakMemory

MEASURED_FIRST, MEASURED_EVERY = 10, 25
"""Memory is measured at a hook's first calls and at every so many later ones: that takes longer than a small hook."""


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
    _memory: PeakMemory = field(default_factory=PeakMemory)

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

    def measures_memory(self, name: str) -> bool:
        """Tell whether the memory of a hook's next call is measured."""
        calls = self.calls.get(name, 0)
        return calls < MEASURED_FIRST or calls % MEASURED_EVERY == 0

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Time a hook's call and measure the memory that it takes at its peak."""
        self._memory.begin()
        try:
            with self.section(name):
                yield
        finally:
            growth = self._memory.growth()
            if growth is not None:
                self.peak_bytes[name] = max(growth, self.peak_bytes.get(name, 0))

    def remembers(self, name: str, state: Mapping[str, Any]) -> None:
        """Note what a hook keeps until its next call."""
        kept = {leaf.untyped_storage().data_ptr(): leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)}
        size = sum(leaf.nbytes for leaf in kept.values())
        self.state_bytes[name] = max(size, self.state_bytes.get(name, 0))

    def passed(self, kind: str, batch: Any) -> None:
        """Count the samples of a batch for the hook under way.

        ``kind`` is the pass: forward, forward_backward, hessian_product, or second_backward (a Hessian-vector product
        where the graph of the gradient was there).
        """
        counts = self.samples.setdefault(self.caller, {})
        counts[kind] = counts.get(kind, 0) + rows(batch)

    def report(self) -> dict[str, dict[str, float]]:
        """Return calls, seconds and, for hooks, bytes by section, the dearest first.

        ``state_bytes`` is the most that a hook remembered between calls, ``peak_bytes`` the most by which memory grew
        during one (see :class:`PeakMemory`).
        """
        order = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)
        sizes = {"state_bytes": self.state_bytes, "peak_bytes": self.peak_bytes}
        return {
            name: {"seconds": self.seconds[name], "calls": self.calls[name]}
            | {key: found[name] for key, found in sizes.items() if name in found}
            for name in order
        }
