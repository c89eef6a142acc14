"""The JSONL record in the folder of a run that is over."""

from pathlib import Path

from framework.errors import UsageError
from framework.replay import RunDescription


def record_of(folder: Path) -> tuple[Path, RunDescription]:
    """Return the record of the run in ``folder`` and what the run was.

    Raises :class:`UsageError` for a folder that holds no run, or a run without a record.
    """
    run = RunDescription.of_folder(folder)
    path = folder / f"{run.strategy}.jsonl"
    if not path.is_file():
        raise UsageError(
            f"{folder} holds no {path.name}, the record that replay sends; a run writes it with --hook-jsonl, and "
            "with --hook-wandb."
        )
    return path, run
