"""``loopscope resume``: what a run was started with, from its folder alone."""

from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..runs import RunRecord, run_folders


def recorded_command(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the experiment of a run and the options of the command that goes on with it, wherever it lies now.

    The folder of one strategy goes on with that strategy, the folder of an experiment with all that the command was
    given. Raises :class:`UsageError` for a folder without a run, or with one that was not started by the command.
    """
    run = run_folders(folder, "resume")[0]
    record = RunRecord.read(run)
    if not record.options:
        raise UsageError(f"{run} was not started by loopscope run, so only the program that did can go on with it.")
    here = {"output_dir": str(run.resolve().parent.parent), "resume": True, "overwrite": False}
    alone = {"strategy": [record.strategy]} if run == folder else {}
    return record.experiment, {**record.options, **here, **alone}
