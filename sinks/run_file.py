"""The file of one strategy, for the sinks that write files, and how it goes on after a resume."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

from loopscope.errors import UsageError
from loopscope.hooks import RunInfo
from loopscope.runs import RecordSink

_REMEDY = "put that file back, or start the run anew with --overwrite."


class FileSink(RecordSink):
    """A sink with a text file of its own for each strategy; an older file of that name is written over.

    Every write reaches the operating system before it returns, so that a killed process loses nothing;
    :meth:`flush` makes it survive a power cut.
    """

    notation: ClassVar[Mapping[str, str]] = {}  # what else a checkpoint must know of how the file is written

    def __init__(self) -> None:
        self._file: FileIO | None = None

    @abstractmethod
    def header(self, run: RunInfo, position: Mapping[str, Any]) -> str:
        """Return the line, or nothing, with which the file of a run begins.

        Raises :class:`UsageError` where it cannot go on at the ``position`` of a checkpoint, which is empty at first.
        """

    def set_run_context(self, run: RunInfo) -> None:
        """Start the strategy's file."""
        self.close("")
        self._file = FileIO(run.output_dir / self.leaves(run.strategy)[0], "w")
        self._write(self.header(run, {}))

    def resume(self, run: RunInfo, position: Mapping[str, Any]) -> None:
        """Go on in the strategy's file, cut back to the position; raises :class:`UsageError` for another file."""
        self.close("")
        header, size = self.header(run, position).encode(), position["size"]

        def fault(file: FileIO) -> str:
            if file.read(len(header)) != header:
                return "its first line is not the one that this run, with its hooks, begins with"
            ends = not size or os.pread(file.fileno(), 1, size - 1) == b"\n"
            return "" if ends else f"no line ends at byte {size:,}, where one did at the checkpoint"

        self._file = reopened(run.output_dir / self.leaves(run.strategy)[0], size, fault)

    def position(self) -> dict[str, Any]:
        """Return the size of the file, all of which the operating system has, and how it is written."""
        return {"size": self._opened().tell(), **self.notation}

    def files(self) -> Sequence[Path]:
        """Name the strategy's file, if it is open."""
        return [] if self._file is None else [Path(str(self._file.name))]

    def flush(self) -> None:
        """Force everything emitted so far onto the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self, status: str) -> None:
        """Close the strategy's file; closing twice does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, text: str) -> None:
        """Append ``text``; raises ``RuntimeError`` when no strategy is under way."""
        write_all(self._opened(), text.encode())

    def _opened(self) -> FileIO:
        if self._file is None:
            raise RuntimeError(
                f"No .{self.name} file is open: emit and position are called after set_run_context(run) and before "
                "close(status)."
            )
        return self._file


def write_all(file: FileIO, data: bytes) -> None:
    """Write all of ``data``, of which the operating system takes a part where the disk is nearly full."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def reopened(path: Path, size: int, fault: Callable[[FileIO], str]) -> FileIO:
    """Open the file of an earlier part of the run behind its first ``size`` bytes, and cut off what follows them.

    Raises :class:`UsageError`, and leaves the file as it is, where it is missing, shorter than that, or another one
    than the checkpoint knows: ``fault`` says why, or nothing.
    """
    try:
        file = FileIO(path, "r+")
    except FileNotFoundError as error:
        raise UsageError(f"{path} is missing, of which the checkpoint knows {size:,} bytes; {_REMEDY}") from error
    try:
        if (found := os.fstat(file.fileno()).st_size) < size:
            raise UsageError(f"{path} has {found:,} bytes, but the checkpoint knows {size:,} of it; {_REMEDY}")
        if reason := fault(file):
            raise UsageError(f"{path} is not the file that the checkpoint knows: {reason}; {_REMEDY}")
        file.truncate(size)
        file.seek(size)
    except BaseException:
        file.close()
        raise
    return file


def complete_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their ends; a last line that a crash cut off is left out."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            if line.endswith("\n"):
                yield line
