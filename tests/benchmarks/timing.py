"""Timing of alternatives in turn, within one process, with differences that are insensitive to load."""

import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

clock = time.process_time
"""CPU time of this process, in seconds: other processes affect it only through the caches, not through scheduling."""


@dataclass(frozen=True)
class Spread:
    """The median over blocks, the difference or ratio of the fastest blocks, and the interquartile range."""

    median: float
    best: float
    noise: float

    @classmethod
    def of(cls, values: Sequence[float], best: float | None = None) -> "Spread":
        """Summarise one value for each block; ``best`` is the least of them unless given."""
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [*values]
        return cls(middle, min(values) if best is None else best, high - low)

    def plus(self, constant: float) -> "Spread":
        """Return the spread of values that are all larger by ``constant``."""
        return Spread(self.median + constant, self.best + constant, self.noise)


def difference(ours: Sequence[float], reference: Sequence[float]) -> Spread:
    """Return the extra time of ``ours``, block by block."""
    values = [one - other for one, other in zip(ours, reference, strict=True)]
    return Spread.of(values, min(ours) - min(reference))


def ratio(ours: Sequence[float], reference: Sequence[float]) -> Spread:
    """Return the time of ``ours`` as a multiple of the reference, block by block."""
    values = [one / other for one, other in zip(ours, reference, strict=True)]
    return Spread.of(values, min(ours) / min(reference))


@dataclass
class Turns:
    """Functions timed in turn, A B A B, the order reversed every other round; a block is ``calls`` calls.

    ``after`` runs untimed after each block. ``seconds`` has a list of seconds per call for each function. ``timer`` is
    the clock: wall-clock time where several threads work.
    """

    functions: Sequence[Callable[[], Any]]
    calls: int = 1
    after: Callable[[], Any] = lambda: None
    timer: Callable[[], float] = clock
    seconds: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = [[] for _ in self.functions]
        self._forward = True

    def round(self) -> None:
        """Time one block of each function."""
        blocks = list(zip(self.functions, self.seconds, strict=True))
        for function, seconds in blocks if self._forward else reversed(blocks):
            calls = range(self.calls)
            begin = self.timer()
            for _ in calls:
                function()
            seconds.append((self.timer() - begin) / self.calls)
            self.after()
        self._forward = not self._forward

    def forget(self) -> None:
        """Discard the times so far, as a warm-up."""
        for seconds in self.seconds:
            seconds.clear()


SLICE = 0.5  # seconds


def in_slices(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of functions that run in separate processes, half a second in turn, under equal load."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in functions]
    begun = zip(functions, pipes, strict=True)
    processes = [context.Process(target=_tell, args=(function, end)) for function, (_, end) in begun]
    for process, (_, end) in zip(processes, pipes, strict=True):
        process.start()
        end.close()  # otherwise the parent waits for a failed process
        os.kill(process.pid or 0, signal.SIGSTOP)
    try:
        while running := [process for process in processes if process.is_alive()]:
            for process in running:
                os.kill(process.pid or 0, signal.SIGCONT)
                process.join(SLICE)
                if process.is_alive():
                    os.kill(process.pid or 0, signal.SIGSTOP)
        return [pipe.recv() for pipe, _ in pipes]
    finally:
        for process in processes:
            process.kill()  # after an interruption, the parent would wait for a paused process


def _tell(function: Callable[[], Any], end: Any) -> None:
    end.send(function())
