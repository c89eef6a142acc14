"""Schedule of checkpoints: every N epochs or steps, on a signal, and after a hook raises."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ..engine import HookManager
from ..errors import notice, warn
from ..state import LoopState
from .content import RunState
from .digest_log import DigestLog
from .row_log import RowLog
from .signals import Signals, StoppedError
from .writer import CheckpointWriter


@dataclass(frozen=True)
class CheckpointPlan:
    """Intervals between checkpoints, and the number of checkpoints to keep.

    Args:
        every: epochs (step loop: steps) between checkpoints; 0 for none.
        every_steps: steps between checkpoints, within epochs too; 0 for none.
        keep: the number of newest checkpoints to keep, in addition to the best.
        digest_every: steps between digests of the training state; 0 for none, ``None`` for one at every snapshot.
    """

    every: int = 0
    every_steps: int = 0
    keep: int = 3
    digest_every: int | None = None

    @property
    def writes(self) -> bool:
        """Whether checkpoints are scheduled."""
        return bool(self.every or self.every_steps)

    def is_due(self, loop: LoopState, *, counts_epochs: bool, unit_ended: bool) -> bool:
        """Return whether a checkpoint is due now."""
        # The unit is an epoch or a step. In the epoch loop this is called after every step and after every epoch, and
        # in the step loop only after steps, so a step has ended if exactly one of the two is true.
        step_ended = unit_ended != counts_epochs
        if step_ended and self.every_steps and loop.step % self.every_steps == 0:
            return True
        done = loop.epoch if counts_epochs else loop.step
        return bool(unit_ended and self.every and done % self.every == 0)


@dataclass
class Checkpointing:
    """Writes the checkpoints of one run, with manifests from ``describe``, and ends the run on a signal."""

    manager: HookManager
    writer: CheckpointWriter
    plan: CheckpointPlan
    signals: Signals
    describe: Callable[[], Mapping[str, Any]] = field(kw_only=True)
    digests: DigestLog | None = field(default=None, kw_only=True)
    rows: RowLog | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Create the copier of the run's state."""
        self._run_state = RunState(self.manager)

    def pause(self, loop: LoopState, *, unit_ended: bool) -> None:
        """Write a checkpoint if one is due or requested.

        Raises:
            StoppedError: if a signal ends the run.
        """
        self._warn_of_failures()
        if self.digests is not None:
            self.digests.pause(loop, unit_ended=unit_ended)
        if self.rows is not None:
            self.rows.pause(loop, step_ended=unit_ended != self.manager.counts_epochs)
        signals, ranks = self.signals, self.manager.task.ranks
        if ranks.are_many and ranks.agree(signals.checkpoint_requested or signals.stop is not None):
            stops, asks = zip(*ranks.gather((signals.stop, signals.checkpoint_requested)), strict=True)
            signals.stop, signals.checkpoint_requested = next(filter(None, stops), None), any(asks)
        checkpoint_requested, signals.checkpoint_requested = signals.checkpoint_requested, False
        ending = signals.stop is not None or self.manager.hooks.failures.pending is not None
        if checkpoint_requested or ending:
            self.take(wait=True)
        elif self.plan.is_due(loop, counts_epochs=self.manager.counts_epochs, unit_ended=unit_ended):
            if self._is_last(loop):  # no later checkpoint could replace it if it were skipped
                self.writer.wait()
            self.take(wait=False)
        if signals.stop is not None:
            raise StoppedError(signals.stop)

    def _is_last(self, loop: LoopState) -> bool:
        task = self.manager.task
        return loop.stopped or loop.step >= task.length * (len(task.loader) if self.manager.counts_epochs else 1)

    def take(self, *, wait: bool) -> None:
        """Write a checkpoint of the current step.

        Without ``wait`` it is written in the background, and skipped if that of an earlier step is still being written.
        """
        step, ranks = self.manager.state.loop.step, self.manager.task.ranks
        if ranks.agree(self.writer.is_busy and not wait and self.writer.step != step):
            reason = "because the previous one is still being written; the disk is slower than the checkpoint interval"
            notice(f"The checkpoint of step {step} is skipped {reason}.")
            return
        self.writer.wait()
        content = self._run_state.take()
        sentences = self._run_state.last_storage_errors()
        if ranks.agree(bool(sentences)):
            of_all_ranks = [*chain.from_iterable(ranks.gather(sentences))]
            notice(f"The checkpoint of step {step} is skipped. {of_all_ranks[0]}")
            return
        with self.manager.between_steps():
            delivery = self.manager.delivery
            manifest, sink_files = {**self.describe(), "sinks": delivery.positions()}, delivery.files()
        if self.digests is not None:
            manifest["digests"] = self.digests.position()
        self.writer.write(step, content, manifest, sink_files)
        self.manager.log(logging.INFO, "Checkpoint of step %d.", step)
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait until the last checkpoint is written, and remove leftovers of incomplete ones."""
        self.writer.finish()
        self._warn_of_failures()

    def _warn_of_failures(self) -> None:
        remark = " Training continues." if self.signals.stop is None else ""
        for sentence in self.writer.failures():
            warn(f"{sentence}{remark}", stacklevel=3)
