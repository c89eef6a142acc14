"""When a checkpoint is written: every so many epochs or steps, on a signal, after a hook raised."""

import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from types import FrameType
from typing import Any

from ..errors import LoopscopeError, notice
from ..firing import HookManager
from ..state import LoopState
from .content import RunState
from .digest_log import DigestLog
from .row_log import RowLog
from .writer import CheckpointWriter

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StoppedError(LoopscopeError):
    """A signal ended the run, after the step that was under way."""

    def __init__(self, number: int) -> None:
        super().__init__(f"Stopped by {signal.Signals(number).name}.")
        self.number = number

    @property
    def status(self) -> int:
        """The exit status that tells of the signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.number


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM came where no step was under way."""


class Signals:
    """Remembers what signals ask for until the run asks, between two steps; where no step is under way they end it."""

    def __init__(self) -> None:
        self.stop: int | None = None
        self.asked = False
        """Whether a checkpoint was asked for since this was last set to ``False``."""
        self._earlier: dict[int, Any] = {}

    @contextmanager
    def around(self) -> Iterator[None]:
        """Let SIGTERM end the body as Ctrl-C does, and SIGUSR1 be remembered, from the first strategy to the last.

        Raises :class:`StoppedError` in the place of the ``KeyboardInterrupt`` with which SIGTERM ends the body.
        """
        try:
            with _handling({signal.SIGTERM: self._interrupted, signal.SIGUSR1: self._received}):
                yield
        except _TerminatedError:
            raise StoppedError(signal.SIGTERM) from None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch SIGINT, SIGTERM and SIGUSR1 in the body; the handlers from before are put back whatever happens.

        Only Python's main thread receives signals: elsewhere nothing is caught. A signal that was ignored stays so.
        """
        with _handling(dict.fromkeys((*STOPPING, signal.SIGUSR1), self._received)) as self._earlier:
            yield

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        raise _TerminatedError

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.asked = True
        elif self.stop is None:
            self.stop = number
        else:
            _put_back(self._earlier)
            signal.raise_signal(number)


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[dict[int, Any]]:
    """Handle signals in the body that are not ignored, and yield the handlers from before, which are put back."""
    earlier: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if signal.getsignal(number) is not signal.SIG_IGN:
                    earlier[number] = signal.signal(number, handler)
        yield earlier
    finally:
        _put_back(earlier)


def _put_back(earlier: dict[int, Any]) -> None:
    while earlier:
        number, handler = earlier.popitem()
        if handler is not None:  # one that was not made in Python cannot be put back
            signal.signal(number, handler)


@dataclass(frozen=True)
class CheckpointPlan:
    """How often checkpoints are written, and how many are kept.

    Args:
        every: epochs (step loop: steps) between checkpoints; 0 for none.
        every_steps: steps between checkpoints, within epochs too; 0 for none.
        keep: how many of the newest are kept, beside the best.
        digest_every: steps between digests of the training state; 0 for none, ``None`` for one at every snapshot.
    """

    every: int = 0
    every_steps: int = 0
    keep: int = 3
    digest_every: int | None = None

    @property
    def writes(self) -> bool:
        """Whether checkpoints are written without anybody asking for one."""
        return bool(self.every or self.every_steps)

    def is_due(self, loop: LoopState, *, counts_epochs: bool, unit_ended: bool) -> bool:
        """Return whether a checkpoint is due now."""
        step_ended = unit_ended != counts_epochs
        if step_ended and self.every_steps and loop.step % self.every_steps == 0:
            return True
        done = loop.epoch if counts_epochs else loop.step
        return bool(unit_ended and self.every and done % self.every == 0)


@dataclass
class Checkpointing:
    """Writes the checkpoints of one run, with the manifests that ``describe`` makes, and ends it if a signal asks."""

    manager: HookManager
    writer: CheckpointWriter
    plan: CheckpointPlan
    signals: Signals
    describe: Callable[[], Mapping[str, Any]] = field(kw_only=True)
    digests: DigestLog | None = field(default=None, kw_only=True)
    rows: RowLog | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Make the buffers for copies."""
        self._run_state = RunState(self.manager)

    def pause(self, loop: LoopState, *, unit_ended: bool) -> None:
        """Write a checkpoint if one is due or asked for; raises :class:`StoppedError` if a signal ends the run."""
        self._tell_failures()
        if self.digests is not None:
            self.digests.pause(loop, unit_ended=unit_ended)
        if self.rows is not None:
            self.rows.pause(loop, step_ended=unit_ended != self.manager.counts_epochs)
        signals, ranks = self.signals, self.manager.task.ranks
        if ranks.are_many and ranks.agree(signals.asked or signals.stop is not None):
            stops, asks = zip(*ranks.gather((signals.stop, signals.asked)), strict=True)
            signals.stop, signals.asked = next(filter(None, stops), None), any(asks)
        asked, signals.asked = signals.asked, False
        ending = signals.stop is not None or self.manager.hooks.failures.pending is not None
        if asked or ending:
            self.take(wait=True)
        elif self.plan.is_due(loop, counts_epochs=self.manager.counts_epochs, unit_ended=unit_ended):
            if self._is_last(loop):  # none comes after it that could make up for it
                self.writer.wait()
            self.take(wait=False)
        if signals.stop is not None:
            raise StoppedError(signals.stop)

    def _is_last(self, loop: LoopState) -> bool:
        task = self.manager.task
        return loop.stopped or loop.step >= task.length * (len(task.loader) if self.manager.counts_epochs else 1)

    def take(self, *, wait: bool) -> None:
        """Write a checkpoint of now; without ``wait`` it is left out where one of an earlier step is being written."""
        step, ranks = self.manager.state.loop.step, self.manager.task.ranks
        if ranks.agree(self.writer.is_busy and not wait and self.writer.step != step):
            late = "since the one before is still being written; the disk is slower than the interval"
            notice(f"The checkpoint of step {step} is left out, {late}.")
            return
        self.writer.wait()
        content = self._run_state.take()
        sentences = self._run_state.refusals_of_the_last()
        if ranks.agree(bool(sentences)):
            told = [*chain.from_iterable(ranks.gather(sentences))]
            notice(f"The checkpoint of step {step} is left out. {told[0]}")
            return
        with self.manager.between_steps():
            dispatch = self.manager.dispatch
            manifest, sink_files = {**self.describe(), "sinks": dispatch.positions()}, dispatch.files()
        if self.digests is not None:
            manifest["digests"] = self.digests.position()
        self.writer.write(step, content, manifest, sink_files)
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait until the last one is written, and leave nothing but checkpoints."""
        self.writer.finish()
        self._tell_failures()

    def _tell_failures(self) -> None:
        remark = " Training goes on." if self.signals.stop is None else ""
        for sentence in self.writer.failures():
            warnings.warn(f"{sentence}{remark}", stacklevel=3)
