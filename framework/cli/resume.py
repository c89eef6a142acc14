"""``loopscope resume``: what a run was started with, from its folder alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..runs import CONFIG


@dataclass(frozen=True)
class RecordedRun:
    """The experiment of a run, and the options of a command that goes on with it."""

    experiment: str
    options: Mapping[str, Any]


def recorded_run(folder: Path) -> RecordedRun:
    """Read how a run was started; it goes on where it lies now, wherever that was then.

    The folder of one strategy goes on with that strategy, the folder of an experiment with all that the command was
    given. Raises :class:`UsageError` for a folder without a run, or with one that was not started by the command.
    """
    if (folder / CONFIG).exists():
        return _recorded(folder, alone=True)
    inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    if not inside:
        raise UsageError(f"{folder} is not the folder of a run: there is no {CONFIG} in it.")
    return _recorded(inside[0], alone=False)


def _recorded(folder: Path, *, alone: bool) -> RecordedRun:
    """Read how the run of one strategy was started, to go on with it ``alone`` or with all of the command."""
    path = folder / CONFIG
    try:
        content = json.loads(path.read_text("utf-8"))
        experiment, strategy, options = content["experiment"], content["strategy"], content["options"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} does not say how the run was started ({type(error).__name__}).") from error
    if not options:
        raise UsageError(f"{folder} was not started by loopscope run, so only the program that did can go on with it.")
    here: dict[str, Any] = {"output_dir": str(folder.resolve().parent.parent), "resume": True, "overwrite": False}
    return RecordedRun(experiment, {**options, **here, **({"strategy": [strategy]} if alone else {})})
