"""Time and calls by section: what ``--profile-hooks`` reports."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter


@dataclass
class Profiler:
    """Adds up wall-clock seconds and calls by section name; switched off it measures nothing."""

    enabled: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    caller: str = ""
    """The hook whose call is under way."""
    passes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Passes through the model that hooks caused, by hook and kind; counted also when nothing is timed."""

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

    def passed(self, kind: str) -> None:
        """Count a pass of one batch for the hook under way: forward, forward_backward or hessian_product."""
        counts = self.passes.setdefault(self.caller, {})
        counts[kind] = counts.get(kind, 0) + 1

    def report(self) -> dict[str, dict[str, float]]:
        """Return seconds and calls by section, the dearest first."""
        order = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)
        return {name: {"seconds": self.seconds[name], "calls": self.calls[name]} for name in order}
