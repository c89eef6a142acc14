"""Resuming a run from its newest intact checkpoint, after checking that the checkpoint belongs to this run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints import MANIFEST, Checkpoint, RunState, newest_intact, read_content
from ..data import data_changed
from ..engine import HookManager
from ..errors import (
    LoopscopeError,
    ReloadedHookError,
    UsageError,
    listed,
    notice,
    short_path,
    shortened,
    user_code_lines,
)
from ..option_words import option_text
from ..state import LoopState
from .file_manifest import refuse_damage
from .records import RunRecord, differences
from .run_folder import RunFolder

MAY_DIFFER = {"output_dir"}
"""Options of an experiment that do not affect the numbers of a run."""


def find_checkpoint(folder: RunFolder, expected: RunRecord) -> Checkpoint | None:
    """Return the checkpoint to resume from, or ``None`` if the run is finished or has no intact checkpoint.

    Notices name damaged checkpoints.

    Raises:
        UsageError: if the folder contains another run, or files of a finished one are damaged; the message lists the
            differences or files.
    """
    if (record := folder.record()) is not None:
        refuse_another_run(folder.path, record, expected)
    if folder.completed() is not None:
        refuse_damage(folder.path)
        return None
    checkpoint = newest_intact(folder.checkpoints, notice)
    if checkpoint is not None:
        refuse_another_run(checkpoint.folder, RunRecord.of(checkpoint.manifest, checkpoint.folder / MANIFEST), expected)
    elif record is not None:
        notice(f"{short_path(folder.path)} has no intact checkpoint: the run restarts from the beginning.")
    return checkpoint


@dataclass(frozen=True)
class ResumedRun:
    """The state of a run in a checkpoint, for the run that resumes from it."""

    checkpoint: Checkpoint

    @property
    def sinks(self) -> Mapping[str, Any]:
        """The positions of the sinks in their files, by name."""
        positions: Mapping[str, Any] = self.checkpoint.manifest["sinks"]
        return positions

    def restore(self, manager: HookManager) -> None:
        """Restore a newly built run; raises :class:`UsageError` if the checkpoint does not fit it."""
        checkpoint = self.checkpoint
        content = read_content(checkpoint, manager.state.model, manager.task.ranks)
        RunState(manager).restore(content, checkpoint.folder)


@contextmanager
def checkpoint_errors(checkpoint: Checkpoint | None, loop: LoopState) -> Iterator[None]:
    """Name the checkpoint in errors that end a resumed run before its first step has ended.

    The original run passed this step, so the checkpoint is the likely cause. An error from the user's code, and a
    warning that a filter turned into an error, are raised with a note.
    """
    try:
        yield
    except Exception as error:
        of_hook = isinstance(error, ReloadedHookError)
        if checkpoint is None or (
            not of_hook and (isinstance(error, LoopscopeError) or loop.step > checkpoint.step + 1)
        ):
            raise
        # A warning that a filter turned into an error does not depend on the checkpoint.
        if not of_hook and (isinstance(error, Warning) or user_code_lines(error)):
            error.add_note(f"This happened before the end of the first step after {checkpoint.folder}.")
            raise
        text = str(error) if of_hook else f"{type(error).__name__}: {error}"
        reason = shortened(" ".join(text.split()), 200).rstrip(".")
        raise UsageError(
            f"The run could not resume from {checkpoint.folder}: {reason}. Unless the code of the run has changed, the "
            "checkpoint differs from what was written: remove it to use an earlier one."
        ) from error


def refuse_another_run(where: Path, earlier: RunRecord, current: RunRecord, *, warn: bool = True) -> None:
    """Raise :class:`UsageError` if two runs differ in anything that decides their numbers.

    With ``warn`` a notice names hooks that differ without changing the numbers.
    """
    old, new = ({"experiment": run.experiment, "strategy": run.strategy, **run.config} for run in (earlier, current))
    if config_changes := differences(old, new, MAY_DIFFER):
        changes = [f"{name} was {old_value!r} and is {value!r}" for name, old_value, value in config_changes]
        raise UsageError(f"{where} belongs to another run: {listed(changes, 5)}. Resume it with its original options.")
    if earlier.treatments != current.treatments:
        names = [", ".join(run.treatments) or "none" for run in (earlier, current)]
        raise UsageError(
            f"{where} was trained with other committing hooks: {names[0]}; now: {names[1]}. These hooks change the "
            "run; use the original ones."
        )
    if (others := differences(earlier.hooks, current.hooks)) and warn:
        notice(
            f"These hooks differ from those in {where}: {listed(sorted(item.name for item in others), 5)}. The "
            "training is the same, but their metrics may differ."
        )


def refuse_other_data(where: Path, earlier: RunRecord, current: RunRecord) -> None:
    """Raise :class:`UsageError` if the data are known to differ from those of the run in ``where``."""
    if data_changed(earlier.rows, current.rows):
        descriptions = [
            f"{rows('rows') or 'an unknown number of'} rows, digest {rows('xxh3_128')} over {rows('covers')}"
            for rows in (earlier.rows.get, current.rows.get)
        ]
        raise UsageError(
            f"The data of {where} ({earlier.data.get('source', earlier.experiment)}) have changed: {descriptions[0]} "
            f"then, {descriptions[1]} now. Its record and checkpoints are still valid, but its steps cannot be trained "
            "again on other data, and its row numbers refer to the original data. Restore the original data."
        )


def check_environment(earlier: Checkpoint | RunRecord, now: RunRecord, *, exact: bool = False) -> None:
    """Report changes of the environment, which may change the last bits of a resumed run.

    Another number of processes is such a change, since it changes the order of summation. ``earlier`` is the checkpoint
    that the run resumes from, or the record of a run that is trained again from its start.

    Raises:
        UsageError: if ``exact`` and the environment has changed.
    """
    if isinstance(earlier, RunRecord):
        record, where = earlier, "the run"
    else:
        record, where = RunRecord.of(earlier.manifest, earlier.folder / MANIFEST), str(earlier.folder)
    environment_changes = differences(record.surroundings, now.surroundings, {"command"})
    changes = [f"{name}: {old} before, {new} now" for name, old, new in environment_changes]
    if changes and exact:
        raise UsageError(
            f"{option_text('exact')}: {where} was written in another environment: {listed(changes, 5)}. Resume in the "
            f"original environment, or omit {option_text('exact')}."
        )
    if changes:
        changed_settings = listed(changes, 5)
        notice(f"The environment has changed, so numbers may differ in the last bits: {changed_settings}.")
