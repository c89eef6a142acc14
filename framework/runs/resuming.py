"""Where a run goes on after an interruption: its newest intact checkpoint, if it is a checkpoint of this run."""

import warnings
from pathlib import Path

from ..checkpoints import MANIFEST, Checkpoint, newest_intact
from ..errors import RunNotice, UsageError, listed
from .records import RunRecord, differences
from .run_folder import RunFolder

MAY_DIFFER = {"output_dir"}
"""Options of an experiment that change nothing in a run."""


def newest_of(folder: RunFolder, expected: RunRecord) -> Checkpoint | None:
    """Return the checkpoint from which a run goes on, or ``None`` if it is finished or has to begin anew.

    Damaged checkpoints are named. Raises :class:`UsageError`, with what differs, if another run lies in the folder.
    """
    if (before := folder.record()) is not None:
        refuse_another_run(folder.path, before, expected)
    if folder.completed() is not None:
        return None
    found = newest_intact(folder.checkpoints, _notice)
    if found is not None:
        refuse_another_run(found.folder, RunRecord.of(found.manifest, found.folder / MANIFEST), expected)
    elif before is not None:
        _notice(f"{folder.path} holds no intact checkpoint: the run begins anew.")
    return found


def refuse_another_run(where: Path, before: RunRecord, now: RunRecord) -> None:
    """Raise :class:`UsageError` if two runs differ in what decides their numbers; a notice tells of other hooks."""
    old, new = ({"experiment": run.experiment, "strategy": run.strategy, **run.config} for run in (before, now))
    if unlike := differences(old, new, MAY_DIFFER):
        told = [f"{name} was {was!r} and is {value!r}" for name, was, value in unlike]
        raise UsageError(f"{where} comes from another run: {listed(told, 5)}. Go on with what it was started with.")
    if before.treatments != now.treatments:
        names = [", ".join(run.treatments) or "none" for run in (before, now)]
        raise UsageError(f"{where} was treated by other hooks: {names[0]}; now {names[1]}. They change the run.")
    if others := differences(before.hooks, now.hooks):
        _notice(
            f"Hooks are not as they were in {where}: {listed(sorted(item.name for item in others), 5)}. The run is the "
            "same, what they report may not be."
        )


def tell_of_environment(found: Checkpoint, now: RunRecord) -> None:
    """Tell what may keep a run that goes on from being the same bit for bit."""
    before = RunRecord.of(found.manifest, found.folder / MANIFEST)
    changes = [
        f"{name}: {old} before, {new} now"
        for name, old, new in differences(before.surroundings, now.surroundings, {"command"})
    ]
    if changes:
        _notice(
            f"The run goes on in another environment, so its numbers may differ in the last bits: {listed(changes, 5)}."
        )


def _notice(sentence: str) -> None:
    warnings.warn(sentence, RunNotice, stacklevel=3)
