"""The time that a training waits for the next batch of a DataLoader, also where no call of a scope shows it."""

from collections.abc import Callable
from threading import get_ident
from typing import Any

from torch.utils.data import dataloader

from ..isolation import VISITS
from ..training import DATA, EVALUATION, HOOKS, StepClock
from .places import place

_CLOCKS: list[StepClock] = []
"""The clocks of the open runs, without references to their models."""


def time_loaders(clock: StepClock) -> None:
    """Let a clock enter the phase of the data while its thread waits for a DataLoader, until :func:`stop_timing`."""
    with VISITS:
        _CLOCKS.append(clock)
        _NEXT.install()


def stop_timing(clock: StepClock) -> None:
    """Time no more loaders for a clock; further calls do nothing."""
    with VISITS:
        _CLOCKS[:] = [item for item in _CLOCKS if item is not clock]
        if not _CLOCKS:
            _NEXT.remove()


def _timed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def __next__(iterator: Any) -> Any:  # noqa: N807 - the name of the replaced function
        here = get_ident()
        # Loaders of hooks and of evaluations are part of theirs.
        clocks = [clock for clock in _CLOCKS if clock.thread == here and clock.phase not in (HOOKS, EVALUATION)]
        outer = [clock.phase for clock in clocks]
        for clock in clocks:
            clock.enter(DATA)
        try:
            return function(iterator)
        finally:
            for clock, phase in zip(clocks, outer, strict=True):
                clock.enter(phase)

    return __next__


# Private: the base of the iterators with and without workers; the class of the loader has only ``__iter__``.
_NEXT = place(dataloader._BaseDataLoaderIter, "__next__", _timed)
