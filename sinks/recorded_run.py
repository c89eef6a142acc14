"""The JSONL record in the folder of a run that is over."""

from collections.abc import Iterator
from pathlib import Path

from loopscope.errors import UsageError
from loopscope.runs import RunDescription

from .jsonl import read_jsonl
from .record import Record


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


def emits_of(record: Path) -> Iterator[Record]:
    """Yield the emits in a record; raises :class:`UsageError` with the number of a line that is none."""
    read = 0
    try:
        for emit in read_jsonl(record):
            yield emit
            read += 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{record} cannot be read: line {read + 1} is no emit ({reason}).") from error
