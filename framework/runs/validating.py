"""Runs trained again, whole or a stretch of them, and compared bit for bit with the checkpoints of the first time."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

from ..checkpoints import (
    Digest,
    Divergence,
    Moment,
    RunState,
    checkpoints_by_moment,
    differing_entries,
    open_checkpoint,
    read_content,
    read_digests,
    rows_entry,
)
from ..data import RowNumbers, whole_batches
from ..digests import state_digests
from ..errors import LoopscopeError, UsageError, listed, notice, require
from ..firing import HookManager
from ..state import LoopState
from .records import RunRecord, differences, read_ended
from .resuming import refuse_another_run, refuse_other_data, tell_of_environment
from .run_folder import RunFolder
from .strategy_run import StrategyRun


class DivergedError(LoopscopeError):
    """A run is not the one whose checkpoints it was compared with; ``elsewhere``: in another environment."""

    elsewhere = False


@dataclass(frozen=True)
class Earlier:
    """What an earlier run left to compare with: its folder, what was run, its intact checkpoints and its digests."""

    folder: Path
    record: RunRecord
    moments: Mapping[Moment, Path]
    digests: Mapping[Moment, Digest]

    @classmethod
    def of(cls, folder: RunFolder, now: RunRecord, *, is_whole: bool = True) -> "Earlier":
        """Return what lies in a folder to compare with a run ``now``, ``is_whole`` or a part of what it is then.

        Raises :class:`UsageError` where that run is another one, or, for a whole one, where there is nothing.
        """
        moments, before, digests = checkpoints_by_moment(folder.checkpoints), folder.record(), read_digests(folder.path)
        if before is None or (is_whole and not (moments or digests)):
            raise UsageError(f"{folder.path} holds no intact checkpoints or digests to compare with.")
        refuse_another_run(folder.path, before, now, tell=is_whole)
        return cls(folder.path, before, moments, digests)


@dataclass
class Validation:
    """Compares at every moment of which there is a checkpoint, and ends the run after ``until``, or the last one."""

    manager: HookManager
    earlier: Earlier
    now: RunRecord
    until: int | None = None
    """The last step to train."""
    compared: list[int] = field(default_factory=list)
    digested: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin to count rows."""
        self.numbers = RowNumbers(whole_batches(self.manager.task.loader))

    def pause(self, loop: LoopState, *, unit_ended: bool) -> None:
        """Compare; raises :class:`DivergedError` that names the first step and tensor, and what else differs."""
        if path := self.earlier.moments.get((loop.epoch, loop.step)):
            content = read_content(open_checkpoint(path), self.manager.state.model, self.manager.task.ranks)
            self._tell(path.parent.parent, differing_entries(content, RunState(self.manager).take()), loop)
            self.compared.append(loop.step)
        if digest := self.earlier.digests.get((loop.epoch, loop.step)):
            found = state_digests(self.manager.state)
            found |= rows_entry(self.manager, self.numbers, digest.since, loop.step)
            names = digest.differing_entries(digest._replace(entries=found))
            self._tell(self.earlier.folder, names if self.manager.task.ranks.is_main else [], loop)
            self.digested.append((loop.epoch, loop.step))
        done = not self.missing() if self.until is None else loop.step >= self.until
        loop.stopped = loop.stopped or (done and unit_ended)  # before the end of an epoch it would be seen there

    def missing(self) -> list[Moment]:
        """Return the moments at which it has not been compared yet."""
        of_digests = [moment for moment in self.earlier.digests if moment not in self.digested]
        return [*sorted(self.earlier.moments)[len(self.compared) :], *of_digests]

    def steps(self) -> list[int]:
        """Return the steps at which it was compared."""
        return sorted({*self.compared, *(step for _, step in self.digested)})

    def _tell(self, where: Path, names: Sequence[str], loop: LoopState) -> None:
        """Raise :class:`DivergedError` if anything differs on any rank."""
        ranks = self.manager.task.ranks
        if every := [*dict.fromkeys(chain.from_iterable(ranks.gather([*names])))]:
            hooks = [", ".join(sorted(run.hooks)) or "none" for run in (self.earlier.record, self.now)]
            surroundings_changes = differences(self.earlier.record.surroundings, self.now.surroundings, {"command"})
            elsewhere = [f"{name}: {old} then, {new} now" for name, old, new in surroundings_changes]
            error = DivergedError(
                f"This run parts from the one in {where} {Divergence(loop.epoch, loop.step, every)}. Its "
                f"hooks: {hooks[1]}; those of the first run: {hooks[0]}."
                + (f" Its environment is another one: {listed(elsewhere, 5)}." if elsewhere else "")
            )
            error.elsewhere = bool(elsewhere)
            raise error


def validate(run: StrategyRun, earlier: Earlier) -> Sequence[int]:
    """Train a strategy that was just prepared and return the steps at which it is the same as an earlier run."""
    validation = Validation(run.manager, earlier, run.record)
    refuse_other_data(earlier.folder, earlier.record, run.know_rows())
    run.folder.make()
    run.again(validation)
    if missing := validation.missing():
        raise DivergedError(f"The run ended before it reached the checkpoints or digests of {missing}.")
    return validation.steps()


@dataclass(frozen=True)
class Stretch:
    """Steps of a run that are to be trained again."""

    step: int
    until: int
    from_start: bool = False
    """Train again from the first step on, so that hooks remember what they would have remembered."""
    label: str = ""
    """The name of the folder for what is recorded, in place of one with the steps."""

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for steps that cannot be."""
        require(self.step >= 1, f"--step is {self.step}; steps are counted from 1.")
        require(self.until >= self.step, f"--until is {self.until}, before --step {self.step}.")

    @property
    def name(self) -> str:
        """The name of the folder for what is recorded."""
        return self.label or f"steps_{self.step}_to_{self.until}"

    def beginning(self, moments: Mapping[Moment, Path], per_epoch: int | None) -> Path | None:
        """Return the nearest checkpoint before the stretch, if there is one to begin from.

        With ``per_epoch``, steps in an epoch, it lies between two epochs, for hooks that look at whole ones.
        """
        earlier = [(epoch, step) for epoch, step in moments if step < self.step and not self.from_start]
        between = [(epoch, step) for epoch, step in earlier if per_epoch is None or step == epoch * per_epoch]
        return moments[max(between)] if between else None


def rewind(run: StrategyRun, stretch: Stretch, earlier: Earlier) -> Sequence[int]:
    """Train a stretch of an earlier run again, and return at which steps it was compared.

    Its metrics lie in the folder of the run; raises :class:`DivergedError` where it is not the run that it was.
    """
    folder, before, manager = earlier.folder, earlier.record, run.manager
    refuse_other_data(folder, before, run.know_rows())
    per_epoch = len(manager.task.loader) if manager.counts_epochs else 1
    ended, last = read_ended(folder), manager.task.length * per_epoch
    if ended is not None:  # a run that failed did so in the step after the last that ended
        last = min(last, ended["steps"] + (ended["status"] != "completed"))
    for name, step in (("step", stretch.step), ("until", stretch.until)):
        require(step <= last, f"--{name} is {step:,}, and the last step of the run in {folder} is {last:,}.")
    others = {hook.name for hook in manager.hooks} - before.hooks.keys()
    if start := stretch.beginning(earlier.moments, per_epoch if others and manager.counts_epochs else None):
        run.resumed = open_checkpoint(start)
    elif stretch.step > 1 and not stretch.from_start:
        steps = min(last, ceil(stretch.until / per_epoch) * per_epoch)
        on_the_way = any(step <= steps for _, step in (*earlier.moments, *earlier.digests))
        notice(_cost(stretch, steps, ended, on_the_way=on_the_way))
    tell_of_environment(run.resumed or before, run.record)
    validation = Validation(manager, earlier, run.record, stretch.until)
    with ExitStack() as held:
        run.enter_anew(held)
        run.again(validation, recorded=True)
    last = run.manager.state.loop.step
    require(last >= stretch.step, f"The run ended after step {last:,}; it never reached step {stretch.step:,}.")
    return validation.steps()


def _cost(stretch: Stretch, steps: int, ended: Mapping[str, Any] | None, *, on_the_way: bool) -> str:
    """Say what it costs to begin at the start, and whether anything can show that the run is the same."""
    pace = ended["seconds"].get("training", 0) / ended["steps"] / 60 if ended and ended["steps"] else 0
    took = f", {steps * pace:.1f} minutes at the pace of its record" if pace else ""
    begins = f"No checkpoint to begin from lies before step {stretch.step:,}: the run is trained again from its start"
    unshown = " No checkpoint or digest lies on the way: nothing can show that it is the same run."
    return f"{begins}, {steps:,} steps{took}.{'' if on_the_way else unshown}"
