"""The file of one strategy, shared by the sinks that write files."""

import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from framework.contexts import RunInfo


class RunFile:
    """A text file named after the strategy, in the run's folder; an older one of that name is written over.

    Every write reaches the operating system before it returns, so that a killed process loses nothing;
    :meth:`flush` makes it survive a power cut.
    """

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._file: FileIO | None = None

    def open(self, run: RunInfo) -> None:
        """Close the file of the strategy before, if any, and start that of ``run``."""
        self.close()
        path = run.output_dir / f"{run.strategy}{self._suffix}"
        self._file = FileIO(path, "w")

    def write(self, text: str) -> None:
        """Append ``text``; raises ``RuntimeError`` when no strategy is under way."""
        if self._file is None:
            raise RuntimeError(
                f"No {self._suffix} file is open: emit is called after set_run_context(run) and before close(status)."
            )
        data = text.encode()
        written = self._file.write(data)
        while written < len(data):
            written += self._file.write(memoryview(data)[written:])

    def flush(self) -> None:
        """Force what was written onto the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def complete_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file without their ends; a last line that a crash cut off is left out."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            if line.endswith("\n"):
                yield line[:-1]
