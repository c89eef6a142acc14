"""Where a run goes on after an interruption: its newest intact checkpoint, if it is a checkpoint of this run."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoints import Checkpoint, newest_intact, plain_json
from ..errors import RunNotice, UsageError, listed
from .records import RunRecord

MAY_DIFFER = {"output_dir"}
"""Options of an experiment that change nothing in a run."""


def described(
    experiment: str,
    strategy: str,
    config: Mapping[str, Any],
    hooks: Mapping[str, Mapping[str, Any]],
    treatments: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Return what tells whether two runs are the same, as it comes back from a file."""
    content: dict[str, Any] = plain_json(
        {"experiment": experiment, "strategy": strategy, "config": config, "hooks": hooks, "treatments": treatments}
    )
    return content


def newest_of(record: RunRecord, expected: Mapping[str, Any]) -> Checkpoint | None:
    """Return the checkpoint from which a run goes on, or ``None`` if it is finished or has to begin anew.

    Damaged checkpoints are named. Raises :class:`UsageError`, with what differs, if another run lies in the folder.
    """
    if (before := record.recorded()) is not None:
        refuse_another_run(str(record.directory), before, expected)
    if record.finished() is not None:
        return None
    found = newest_intact(record.checkpoints, _notice)
    if found is None:
        if before is not None:
            _notice(f"{record.directory} holds no intact checkpoint: the run begins anew.")
        return None
    refuse_another_run(str(found.folder), found.manifest, expected)
    return found


def refuse_another_run(where: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` if two runs differ in what decides their numbers; a notice tells of other hooks."""
    differing = [key for key in ("experiment", "strategy") if before.get(key) != now[key]]
    old, new = before.get("config", {}), now["config"]
    differing += [key for key in {**old, **new} if key not in MAY_DIFFER and old.get(key) != new.get(key)]
    values = {**now, **new}, {**before, **old}
    if differing:
        told = [f"{key} was {values[1].get(key)!r} and is {values[0].get(key)!r}" for key in differing]
        raise UsageError(f"{where} comes from another run: {listed(told, 5)}. Go on with what it was started with.")
    if before.get("treatments") != now["treatments"]:
        names = [", ".join(run.get("treatments") or {}) or "none" for run in (before, now)]
        raise UsageError(f"{where} was treated by other hooks: {names[0]}; now {names[1]}. They change the run.")
    hooks = before.get("hooks", {}), now["hooks"]
    others = [name for name in {**hooks[0], **hooks[1]} if hooks[0].get(name) != hooks[1].get(name)]
    if others:
        _notice(
            f"Hooks are not as they were in {where}: {listed(sorted(others), 5)}. The run is the same, what they "
            "report may not be."
        )


def environment_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say in what two environments differ, entry by entry."""
    return [
        f"{key}: {before.get(key)} before, {value} now"
        for key, value in now.items()
        if key != "command" and before.get(key) != value
    ]


def tell_of_environment(found: Checkpoint, now: Mapping[str, Any]) -> None:
    """Tell what may keep a run that goes on from being the same bit for bit."""
    changes = environment_changes({**found.manifest["versions"], **found.manifest["environment"]}, now)
    if changes:
        _notice(
            f"The run goes on in another environment, so its numbers may differ in the last bits: {listed(changes, 5)}."
        )


def _notice(sentence: str) -> None:
    warnings.warn(sentence, RunNotice, stacklevel=3)
