"""The file of one strategy, shared by the sinks that write files, and how it goes on after a resume."""

import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from loopscope.errors import UsageError
from loopscope.hooks import RunInfo

_REMEDY = "put that file back, or start the run anew with --overwrite."


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
        self._file = FileIO(self._path(run), "w")

    def resume(self, run: RunInfo, size: int, header: bytes = b"") -> None:
        """Go on in the file of ``run`` behind its first ``size`` bytes; what follows them is cut off.

        Raises :class:`UsageError`, and leaves the file as it is, where it is missing, shorter than that, begins
        with another ``header`` or has no end of a line there.
        """
        self.close()
        file = reopened(self._path(run), size)
        try:
            if file.read(len(header)) != header:
                raise replaced(file, "its first line is not the one that this run, with its hooks, begins with")
            if size and _read_at(file, size - 1, 1) != b"\n":
                raise replaced(file, f"no line ends at byte {size:,}, where one did at the checkpoint")
            cut_back(file, size)
        except BaseException:
            file.close()
            raise
        self._file = file

    @property
    def size(self) -> int:
        """How many bytes were written, all of which the operating system has."""
        return self._opened().tell()

    @property
    def paths(self) -> list[Path]:
        """The file, if it is open."""
        return [] if self._file is None else [Path(str(self._file.name))]

    def _path(self, run: RunInfo) -> Path:
        return run.output_dir / f"{run.strategy}{self._suffix}"

    def write(self, text: str) -> None:
        """Append ``text``; raises ``RuntimeError`` when no strategy is under way."""
        write_all(self._opened(), text.encode())

    def _opened(self) -> FileIO:
        if self._file is None:
            raise RuntimeError(
                f"No {self._suffix} file is open: emit and position are called after set_run_context(run) and before "
                "close(status)."
            )
        return self._file

    def flush(self) -> None:
        """Force what was written onto the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def write_all(file: FileIO, data: bytes) -> None:
    """Write all of ``data``, of which the operating system takes a part where the disk is nearly full."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def reopened(path: Path, size: int) -> FileIO:
    """Open the file of an earlier part of the run, of which a checkpoint knows ``size`` bytes, at its beginning.

    Raises :class:`UsageError` where it is missing or shorter.
    """
    try:
        file = FileIO(path, "r+")
    except FileNotFoundError as error:
        raise UsageError(f"{path} is missing, of which the checkpoint knows {size:,} bytes; {_REMEDY}") from error
    if (found := os.fstat(file.fileno()).st_size) < size:
        file.close()
        raise UsageError(f"{path} has {found:,} bytes, but the checkpoint knows {size:,} of it; {_REMEDY}")
    return file


def cut_back(file: FileIO, size: int) -> None:
    """Cut off what stands behind the first ``size`` bytes and go on there."""
    file.truncate(size)
    file.seek(size)


def _read_at(file: FileIO, begin: int, count: int) -> bytes:
    file.seek(begin)
    return file.read(count)


def replaced(file: FileIO, reason: str) -> UsageError:
    """Make the error for a file that is another one than a checkpoint knows."""
    return UsageError(f"{file.name} is not the file that the checkpoint knows: {reason}; {_REMEDY}")


def complete_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their ends; a last line that a crash cut off is left out."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            if line.endswith("\n"):
                yield line
