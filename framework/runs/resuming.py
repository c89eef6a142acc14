"""Where a run goes on after an interruption: its newest intact checkpoint, if it is a checkpoint of this run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

from ..checkpoints import MANIFEST, STATE, Checkpoint, RunState, newest_intact, read_content
from ..data import changed
from ..errors import LoopscopeError, ReloadedHookError, UsageError, listed, notice, passed_through_users_code, shortened
from ..firing import HookManager
from ..state import LoopState
from .records import FailedHook, RunRecord, checked, differences
from .run_folder import RunFolder

MAY_DIFFER = {"output_dir"}
"""Options of an experiment that change nothing in a run."""


OF_MANIFEST = {"epoch": int, "step": int, "initial": Mapping[str, Any], "sinks": Mapping[str, Mapping[str, Any] | None]}
"""What is read of the manifest of a run's checkpoint, beside its :class:`RunRecord`."""
OF_HOOKS = {"samples": Mapping[str, Mapping[str, int]], "errors": Sequence[FailedHook], "left_out": Mapping[str, str]}
"""What is checked of the content of a checkpoint, beside its state, before any part of it takes its own back."""


def newest_of(folder: RunFolder, expected: RunRecord) -> Checkpoint | None:
    """Return the checkpoint from which a run goes on, or ``None`` if it is finished or has to begin anew.

    Damaged checkpoints are named. Raises :class:`UsageError`, with what differs, if another run lies in the folder.
    """
    if (before := folder.record()) is not None:
        refuse_another_run(folder.path, before, expected)
    if folder.completed() is not None:
        return None
    found = newest_intact(folder.checkpoints, notice)
    if found is not None:
        refuse_another_run(found.folder, RunRecord.of(found.manifest, found.folder / MANIFEST), expected)
    elif before is not None:
        notice(f"{folder.path} holds no intact checkpoint: the run begins anew.")
    return found


def resume_run(manager: HookManager, found: Checkpoint) -> None:
    """Make a run that was just built what it was; raises :class:`UsageError` for a checkpoint that no run has written.

    Bytes that are damaged are found by their digests; this is about what is written otherwise.
    """
    checked(found.manifest, OF_MANIFEST, found.folder / MANIFEST)
    path, content = found.folder / STATE, read_content(found, manager.state.model, manager.task.ranks)
    kept = {name: of for name, of in get_type_hints(LoopState).items() if name in manager.state.loop.state_dict()}
    checked(content, {"state": Mapping[str, Any], **OF_HOOKS}, path)
    loop = content["state"].get("loop")
    # An evaluation may return numbers of any kind.
    checked(loop if isinstance(loop, Mapping) else {}, kept | {"evaluation": dict}, path)
    for name, dimensions in {"running_loss": 0, "step_series": 2}.items():
        if loop[name] is not None and loop[name].ndim != dimensions:
            raise UsageError(f"{path} cannot be used: its field {name!r} must have {dimensions} dimensions.")
    if (loop["epoch"], loop["step"]) != (found.manifest["epoch"], found.manifest["step"]):
        raise UsageError(f"{path} cannot be used: its epoch and step are not those in {MANIFEST}.")
    RunState(manager).restore(content, found.folder)


@contextmanager
def first_step_after(found: Checkpoint | None, loop: LoopState) -> Iterator[None]:
    """Name the checkpoint where a run fails before or in the first step after it, as the run before it did not.

    An error within the user's own code keeps its own lines, and so does a warning that a filter made an error.
    """
    try:
        yield
    except Exception as error:
        of_hook = isinstance(error, ReloadedHookError)
        if found is None or (not of_hook and (isinstance(error, LoopscopeError) or loop.step > found.step + 1)):
            raise
        # A warning that a filter made an error says nothing about the checkpoint.
        if not of_hook and (isinstance(error, Warning) or passed_through_users_code(error)):
            error.add_note(f"This happened before the first step after {found.folder} had ended.")
            raise
        text = str(error) if of_hook else f"{type(error).__name__}: {error}"
        told = shortened(" ".join(text.split()), 200).rstrip(".")
        raise UsageError(
            f"The run could not go on from {found.folder}: {told}. Unless the code of the run has changed, the "
            "checkpoint is not what was written: remove it, and an earlier one is used."
        ) from error


def refuse_another_run(where: Path, before: RunRecord, now: RunRecord, *, tell: bool = True) -> None:
    """Raise :class:`UsageError` if two runs differ in what decides their numbers, and ``tell`` of other hooks."""
    old, new = ({"experiment": run.experiment, "strategy": run.strategy, **run.config} for run in (before, now))
    if config_changes := differences(old, new, MAY_DIFFER):
        told = [f"{name} was {was!r} and is {value!r}" for name, was, value in config_changes]
        raise UsageError(f"{where} comes from another run: {listed(told, 5)}. Go on with what it was started with.")
    if before.treatments != now.treatments:
        names = [", ".join(run.treatments) or "none" for run in (before, now)]
        raise UsageError(f"{where} was treated by other hooks: {names[0]}; now {names[1]}. They change the run.")
    if (others := differences(before.hooks, now.hooks)) and tell:
        notice(
            f"Hooks are not as they were in {where}: {listed(sorted(item.name for item in others), 5)}. The run is the "
            "same, what they report may not be."
        )


def refuse_other_data(where: Path, before: RunRecord, now: RunRecord) -> None:
    """Raise :class:`UsageError` if the data are not those of the run in ``where``; an old record does not tell."""
    if changed(before.rows, now.rows):
        told = [
            f"{rows('rows') or 'an unknown number of'} rows, digest {rows('xxh3_128')} over {rows('covers')}"
            for rows in (before.rows.get, now.rows.get)
        ]
        raise UsageError(
            f"The data of {where} ({before.data.get('source', before.experiment)}) have changed: {told[0]} then, "
            f"{told[1]} now. What its record and its checkpoints hold is still what was measured; but no step can be "
            "trained again on other data, and the rows that it names are others by now. Put the data back as they were."
        )


def tell_of_environment(found: Checkpoint | RunRecord, now: RunRecord, *, exact: bool = False) -> None:
    """Tell what may keep a run that goes on from being the same bit for bit; raise :class:`UsageError` if it must be.

    Another number of processes does: then sums are taken in another order. A run from its start is ``found`` as what
    was run.
    """
    if isinstance(found, RunRecord):
        before, where = found, "the run"
    else:
        before, where = RunRecord.of(found.manifest, found.folder / MANIFEST), str(found.folder)
    environment_changes = differences(before.surroundings, now.surroundings, {"command"})
    changes = [f"{name}: {old} before, {new} now" for name, old, new in environment_changes]
    if changes and exact:
        told = f"{where} was written in another environment: {listed(changes, 5)}"
        raise UsageError(f"--exact: {told}. Go on as it was, or leave --exact out.")
    if changes:
        told = listed(changes, 5)
        notice(f"The run goes on in another environment, so its numbers may differ in the last bits: {told}.")
