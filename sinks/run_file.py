"""The file of one strategy, for the sinks that write files, and how it goes on after a resume."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

import xxhash
from loopscope.errors import UsageError
from loopscope.hooks import RunInfo
from loopscope.runs import RecordSink

CHUNK = 1 << 24
_REMEDY = "put that file back, or start the run anew with --overwrite."


class RunFile:
    """A file that a run writes from its beginning to its end, and a digest of all that stands in it.

    Every write reaches the operating system before it returns, so that a killed process loses nothing.
    """

    def __init__(
        self, path: Path, position: Mapping[str, Any] | None = None, fault: Callable[[FileIO, int], str] | None = None
    ) -> None:
        """Write over the file at ``path``, or go on in it at the ``position`` of a checkpoint.

        What follows the position is cut off by :meth:`cut`, the first write or flush, and not before: until then
        another file of the run may be refused, and this one is to be left as it is.

        Raises :class:`UsageError`, and leaves the file as it is, where it is missing, shorter than that, or another one
        than the checkpoint knows: ``fault`` says of file and size why, or nothing.
        """
        self.path, self._digest = path, xxhash.xxh3_128()
        self.is_as_found = position is not None
        """Whether what follows the position is still there."""
        if position is None:
            self._file = FileIO(path, "w")
            return
        size = size_at(position)
        try:
            self._file = FileIO(path, "r+")
        except FileNotFoundError as error:
            raise UsageError(f"{path} is missing, of which the checkpoint knows {size:,} bytes; {_REMEDY}") from error
        except OSError as error:
            raise UsageError(f"{path} cannot be opened to go on in it: {error.strerror}; {_REMEDY}") from error
        try:
            if (found := os.fstat(self._file.fileno()).st_size) < size:
                raise UsageError(f"{path} has {found:,} bytes, but the checkpoint knows {size:,} of it; {_REMEDY}")
            if reason := (fault and fault(self._file, size)) or self._changed(size, position):
                raise UsageError(f"{path} is not the file that the checkpoint knows: {reason}; {_REMEDY}")
            self._file.seek(size)
        except BaseException:
            self.close()
            raise

    def _changed(self, size: int, position: Mapping[str, Any]) -> str:
        """Digest the first ``size`` bytes, and say what is wrong with them."""
        for begin in range(0, size, CHUNK):
            self._digest.update(os.pread(self._file.fileno(), min(CHUNK, size - begin), begin))
        same = position.get("xxh3_128", self._digest.hexdigest()) == self._digest.hexdigest()
        return "" if same else f"of its first {size:,} bytes some were changed since the checkpoint"

    def write(self, data: bytes) -> None:
        """Append all of ``data``, of which the operating system takes a part where the disk is nearly full."""
        self.cut()
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._digest.update(data)

    def position(self) -> dict[str, Any]:
        """Return size and digest of the file; ``FileNotFoundError`` if another file, or none, has its name by now."""
        try:
            is_there = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except OSError:
            is_there = False
        if not is_there:
            raise FileNotFoundError(f"{self.path} was removed or replaced under the run, and what it held is lost")
        return {"size": self._file.tell(), "xxh3_128": self._digest.hexdigest()}

    def flush(self) -> None:
        """Force everything written so far onto the disk."""
        self.cut()
        os.fsync(self._file.fileno())

    def cut(self) -> None:
        """Cut off what follows the position at which the file was opened again."""
        if self.is_as_found:
            self._file.truncate()
            self.is_as_found = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class FileSink(RecordSink):
    """A sink with text files of its own for each strategy, those that it leaves; older ones are written over.

    A killed process loses nothing of it; :meth:`flush` makes it survive a power cut.
    """

    notation: ClassVar[Mapping[str, str]] = {}  # what else a checkpoint must know of how the file is written

    def __init__(self) -> None:
        self._files: list[RunFile] = []

    @abstractmethod
    def header(self, run: RunInfo, position: Mapping[str, Any]) -> str:
        """Return the line, or nothing, with which the first file of a run begins.

        Raises :class:`UsageError` where it cannot go on at the ``position`` of a checkpoint, which is empty at first.
        """

    def set_run_context(self, run: RunInfo) -> None:
        """Start the strategy's files."""
        self.close("")
        self._files = [RunFile(run.output_dir / name) for name in self.leaves(run.strategy)]
        self._write(self.header(run, {}))

    def resume(self, run: RunInfo, position: Mapping[str, Any]) -> None:
        """Go on in the strategy's files at the position; raises :class:`UsageError` for another file."""
        self.close("")
        header = self.header(run, position).encode()

        def fault(file: FileIO, size: int) -> str:
            if file.read(len(header)) != header:
                return "its first line is not the one that this run, with its hooks, begins with"
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                return f"no line ends at byte {size:,}, where one did at the checkpoint"
            return ""

        first, *others = self.leaves(run.strategy)
        self._files = [RunFile(run.output_dir / first, position, fault)]
        try:
            for name in others:  # an earlier version may have known nothing of it
                self._files.append(RunFile(run.output_dir / name, position.get(name)))
        except UsageError:
            self.close("failed")
            raise

    def position(self) -> dict[str, Any]:
        """Return size and digest of the first file, those of the others by name, and how it is written.

        The operating system has all of it. Raises ``FileNotFoundError`` if another file, or none, has its name by now.
        """
        first, *others = self._opened()
        return {**first.position(), **{file.path.name: file.position() for file in others}, **self.notation}

    def files(self) -> Sequence[Path]:
        """Name the strategy's files, if they are open."""
        return [file.path for file in self._files]

    def flush(self) -> None:
        """Force everything emitted so far onto the disk."""
        for file in self._files:
            file.flush()

    def close(self, status: str) -> None:
        """Close the strategy's files, which a run that failed before its first row leaves as it found them.

        Closing twice does nothing.
        """
        files, self._files = self._files, []
        for file in files:
            if status != "failed":
                file.cut()
            file.close()

    def _write(self, text: str, file: int = 0) -> None:
        """Append ``text`` to a file, by its place; raises ``RuntimeError`` when no strategy is under way."""
        self._opened()[file].write(text.encode())

    def _opened(self) -> list[RunFile]:
        if not self._files:
            raise RuntimeError(
                f"No .{self.name} file is open: emit and position are called after set_run_context(run) and before "
                "close(status)."
            )
        return self._files


def size_at(position: Any) -> int:
    """Return how many bytes a checkpoint knows of a file; raises :class:`UsageError` where it does not say it."""
    size = position.get("size") if isinstance(position, Mapping) else None
    if type(size) is not int or size < 0:
        raise UsageError(f"The checkpoint does not say how many bytes a file of the run had: {size!r}; {_REMEDY}")
    return size


def complete_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their ends; a last line that a crash cut off is left out."""
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from (line for line in file if line.endswith("\n"))
