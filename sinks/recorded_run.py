"""The JSONL record in the folder of a run that is over, as ``loopscope replay`` sends it."""

from dataclasses import dataclass
from pathlib import Path

from loopscope.errors import UsageError
from loopscope.runs import RunRecord, read_status


@dataclass(frozen=True)
class RecordedRun:
    """A run that is over: what was run, the file of its metrics, and how it ended."""

    run: RunRecord
    record: Path
    status: str

    @classmethod
    def read(cls, folder: Path) -> "RecordedRun":
        """Read a run's folder; a run without a summary was killed, and counts as failed.

        Raises :class:`UsageError` for a folder that holds no run, or a run without a record.
        """
        run = RunRecord.read(folder)
        path = folder / f"{run.strategy}.jsonl"
        if not path.is_file():
            raise UsageError(
                f"{folder} holds no {path.name}, the record that replay sends; a run writes it with --hook-jsonl, and "
                "with --hook-wandb."
            )
        return cls(run, path, read_status(folder) or "failed")
