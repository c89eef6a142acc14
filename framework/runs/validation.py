"""Training a run or a stretch of it again, with bitwise comparison to the checkpoints and digests of the first time."""

from collections.abc import Mapping, Sequence
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
    is_locked,
    open_checkpoint,
    read_content,
    read_digests,
    rows_entry,
)
from ..data import RowNumbers, global_batches
from ..digests import state_digests
from ..engine import HookManager
from ..errors import LoopscopeError, UsageError, listed, notice, require, short_path
from ..option_words import option_text
from ..state import LoopState
from .budgets import read_decisions
from .records import RunRecord, differences, read_last_step, read_outcome
from .resume import check_environment, refuse_another_run, refuse_other_data
from .run_folder import RunFolder
from .strategy_training import StrategyTraining


class DivergedError(LoopscopeError):
    """A run differs from the checkpoints or digests of the run that it repeats."""

    in_other_environment = False
    """Whether the two runs have different environments."""


@dataclass(frozen=True)
class EarlierRun:
    """An earlier run to compare with: its folder, its record, its intact checkpoints and its digests."""

    folder: Path
    record: RunRecord
    moments: Mapping[Moment, Path]
    digests: Mapping[Moment, Digest]

    @classmethod
    def of(cls, folder: RunFolder, now: RunRecord, *, is_whole: bool = True) -> "EarlierRun":
        """Return the run in a folder, to compare with the run ``now``, which repeats all of it or a part.

        Raises:
            UsageError: if the folder contains another run, or one that is being trained, or if ``is_whole`` and the
                run has no checkpoints and digests.
        """
        shown = short_path(folder.path)
        require(not is_locked(folder.path), f"{shown} is still being trained; wait until it has ended.")
        moments, record, digests = checkpoints_by_moment(folder.checkpoints), folder.record(), read_digests(folder.path)
        if record is None or (is_whole and not (moments or digests)):
            raise UsageError(f"{shown} has no intact checkpoints or digests to compare with.")
        refuse_another_run(folder.path, record, now, warn=False)
        return cls(folder.path, record, moments, digests)


@dataclass
class Validation:
    """Compares a run with each checkpoint and digest of an earlier one, and ends it after the last of them."""

    manager: HookManager
    earlier: EarlierRun
    now: RunRecord
    until: int | None = None
    """The last step to train, if it is not that of the last checkpoint or digest."""
    compared: list[int] = field(default_factory=list)
    digested: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Create the row numbers for digests."""
        self.numbers = RowNumbers(global_batches(self.manager.task.loader))

    def pause(self, loop: LoopState, *, unit_ended: bool) -> None:
        """Compare the state with the checkpoint and the digest of this moment, if any.

        Raises:
            DivergedError: if they differ; the message has the step, the first tensor, the hooks and the environment.
        """
        if path := self.earlier.moments.get((loop.epoch, loop.step)):
            content = read_content(open_checkpoint(path), self.manager.state.model, self.manager.task.ranks)
            self._require_equal(path.parent.parent, differing_entries(content, RunState(self.manager).take()), loop)
            self.compared.append(loop.step)
        if digest := self.earlier.digests.get((loop.epoch, loop.step)):
            entries = state_digests(self.manager.state)
            entries |= rows_entry(self.manager, self.numbers, digest.since, loop.step)
            names = digest.differing_entries(digest._replace(entries=entries))
            self._require_equal(self.earlier.folder, names if self.manager.task.ranks.is_main else [], loop)
            self.digested.append((loop.epoch, loop.step))
        done = not self.missing() if self.until is None else loop.step >= self.until
        loop.stopped = loop.stopped or (done and unit_ended)  # not within an epoch, whose end would see it

    def missing(self) -> list[Moment]:
        """Return the moments that have not been compared yet."""
        of_digests = [moment for moment in self.earlier.digests if moment not in self.digested]
        return [*sorted(self.earlier.moments)[len(self.compared) :], *of_digests]

    def steps(self) -> list[int]:
        """Return the compared steps."""
        return sorted({*self.compared, *(step for _, step in self.digested)})

    def _require_equal(self, where: Path, names: Sequence[str], loop: LoopState) -> None:
        """Raise :class:`DivergedError` if any rank has names of differing entries."""
        ranks = self.manager.task.ranks
        if all_names := [*dict.fromkeys(chain.from_iterable(ranks.gather([*names])))]:
            raise divergence_error(where, self.earlier.record, self.now, Divergence(loop.epoch, loop.step, all_names))


def divergence_error(where: Path, earlier: RunRecord, now: RunRecord, divergence: Divergence) -> DivergedError:
    """Return the error about a run that diverges from the one in ``where``, with the changes of its environment."""
    hooks = [", ".join(sorted(run.hooks)) or "none" for run in (earlier, now)]
    surroundings_changes = differences(earlier.surroundings, now.surroundings, {"command"})
    changes = [f"{name}: {old} then, {new} now" for name, old, new in surroundings_changes]
    error = DivergedError(
        f"This run diverges from the one in {where} {divergence}. Its hooks: {hooks[1]}; those of the first run: "
        f"{hooks[0]}." + (f" Its environment differs: {listed(changes, 5)}." if changes else "")
    )
    error.in_other_environment = bool(changes)
    return error


def validate(training: StrategyTraining, earlier: EarlierRun) -> Sequence[int]:
    """Train a new run from its start and return the steps at which it equals the earlier run.

    Raises:
        DivergedError: if it differs, or ends before the last checkpoint or digest.
    """
    validation = Validation(training.manager, earlier, training.run.record)
    refuse_other_data(earlier.folder, earlier.record, training.record_rows())
    training.folder.make()
    _repeat_budget(training.manager, earlier.folder)
    training.retrain(validation)
    if missing := validation.missing():
        raise DivergedError(f"The run ended before the checkpoints or digests of these (epoch, step): {missing}.")
    return validation.steps()


@dataclass(frozen=True)
class StepRange:
    """The steps of a run to train again."""

    step: int
    until: int
    from_start: bool = False
    """Start at the first step, so that the hooks have the history that they would have had."""
    label: str = ""
    """The name of the folder for the metrics, in place of one with the steps."""

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for impossible steps."""
        require(self.step >= 1, f"{option_text('step')} is {self.step}; steps are counted from 1.")
        first = option_text("step", self.step)
        require(self.until >= self.step, f"{option_text('until')} is {self.until}, before {first}.")

    @property
    def name(self) -> str:
        """The name of the folder for the metrics."""
        return self.label or f"steps_{self.step}_to_{self.until}"

    def find_start(self, moments: Mapping[Moment, Path], per_epoch: int | None) -> Path | None:
        """Return the nearest checkpoint before the stretch, or ``None``.

        With ``per_epoch``, the steps of an epoch, only checkpoints between epochs count, for hooks that need complete
        epochs.
        """
        earlier = [(epoch, step) for epoch, step in moments if step < self.step and not self.from_start]
        between = [(epoch, step) for epoch, step in earlier if per_epoch is None or step == epoch * per_epoch]
        return moments[max(between)] if between else None


def rewind(training: StrategyTraining, stretch: StepRange, earlier: EarlierRun) -> Sequence[int]:
    """Train a stretch of an earlier run again, record its metrics, and return the compared steps.

    Raises:
        DivergedError: if it differs from the earlier run.
    """
    folder, record, manager = earlier.folder, earlier.record, training.manager
    refuse_other_data(folder, record, training.record_rows())
    per_epoch = len(manager.task.loader) if manager.counts_epochs else 1
    last, last_of_run = manager.task.length * per_epoch, read_last_step(folder)
    if last_of_run is not None:
        last = min(last, last_of_run)
    for name, step in (("step", stretch.step), ("until", stretch.until)):
        require(step <= last, f"--{name} is {step:,}, but the last step of the run in {folder} is {last:,}.")
    new_hooks = {hook.name for hook in manager.hooks} - record.hooks.keys()
    if start := stretch.find_start(earlier.moments, per_epoch if new_hooks and manager.counts_epochs else None):
        training.resume_from(open_checkpoint(start))
    elif stretch.step > 1 and not stretch.from_start:
        steps = min(last, ceil(stretch.until / per_epoch) * per_epoch)
        is_comparable = any(step <= steps for _, step in (*earlier.moments, *earlier.digests))
        notice(_describe_cost(stretch, steps, read_outcome(folder), is_comparable=is_comparable))
    check_environment(training.resumed or record, training.run.record)
    validation = Validation(manager, earlier, training.run.record, stretch.until)
    try:
        training.run.enter_folder()
        training.claim()
        _repeat_budget(manager, folder)
        training.retrain(validation, recorded=True)
    finally:
        training.run.release()
    last = manager.state.loop.step
    require(last >= stretch.step, f"The run ended after step {last:,}, before step {stretch.step:,}.")
    return validation.steps()


def _repeat_budget(manager: HookManager, folder: Path) -> None:
    """Let the hooks of a budget have the schedules that they had in an earlier run."""
    if manager.budget is not None:
        manager.budget.repeat(read_decisions(folder))


def _describe_cost(stretch: StepRange, steps: int, outcome: Mapping[str, Any] | None, *, is_comparable: bool) -> str:
    """Describe the cost of training from the start, and whether the result can be compared with the earlier run."""
    pace = outcome["seconds"].get("training", 0) / outcome["steps"] / 60 if outcome and outcome["steps"] else 0
    duration = f", about {steps * pace:.1f} minutes at the speed of the first run" if pace else ""
    warning = " It has no checkpoint or digest up to there, so nothing can show that it is the same run."
    return (
        f"There is no checkpoint before step {stretch.step:,} to start from: the run is trained again from its start, "
        f"{steps:,} steps{duration}.{'' if is_comparable else warning}"
    )
