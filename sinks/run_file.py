"""Files of one strategy for sinks that write files, with truncation to a checkpoint on resume."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import xxhash
from loopscope.errors import UsageError
from loopscope.option_words import option_text
from loopscope.runs import RecordSink

if TYPE_CHECKING:
    from loopscope.hooks import RunInfo

CHUNK = 1 << 24


def _remedy() -> str:
    return f"restore that file, or restart the run with {option_text('overwrite', True)}."


class RunFile:
    """An append-only file of a run, with a digest of its content.

    Every write reaches the operating system before it returns, so that a killed process loses nothing.
    """

    def __init__(
        self, path: Path, position: Mapping[str, Any] | None = None, fault: Callable[[FileIO, int], str] | None = None
    ) -> None:
        """Overwrite the file at ``path``, or reopen it at the ``position`` of a checkpoint.

        The content after the position is removed by :meth:`cut`, the first write or flush, and not earlier: another
        file of the run may still be refused, and then this file must stay unchanged.

        Args:
            path: the file.
            position: the result of :meth:`position` at the checkpoint; by default the file is overwritten.
            fault: called with file and size; returns why the content does not match, or an empty text.

        Raises:
            UsageError: if the file is missing, too short, or differs from its state at the checkpoint. The file is not
                changed.
        """
        self.path, self._digest = path, xxhash.xxh3_128()
        self.needs_cut = position is not None
        """Whether the content after the position has not been removed yet."""
        if position is None:
            self._file = FileIO(path, "w")
            return
        size = size_at(position)
        try:
            self._file = FileIO(path, "r+")
        except FileNotFoundError as error:
            raise UsageError(f"{path} is missing; it had {size:,} bytes at the checkpoint; {_remedy()}") from error
        except OSError as error:
            raise UsageError(f"{path} cannot be opened for appending: {error.strerror}; {_remedy()}") from error
        try:
            if (actual_size := os.fstat(self._file.fileno()).st_size) < size:
                raise UsageError(f"{path} has {actual_size:,} bytes, but had {size:,} at the checkpoint; {_remedy()}")
            if reason := (fault and fault(self._file, size)) or self._changed(size, position):
                raise UsageError(f"{path} differs from the file at the checkpoint: {reason}; {_remedy()}")
            self._file.seek(size)
        except BaseException:
            self.close()
            raise

    def _changed(self, size: int, position: Mapping[str, Any]) -> str:
        """Digest the first ``size`` bytes, and return why they differ, or an empty text."""
        for begin in range(0, size, CHUNK):
            self._digest.update(os.pread(self._file.fileno(), min(CHUNK, size - begin), begin))
        same = position.get("xxh3_128", self._digest.hexdigest()) == self._digest.hexdigest()
        return "" if same else f"some of its first {size:,} bytes have changed"

    def write(self, data: bytes) -> None:
        """Append all of ``data``, in several writes if the operating system accepts only a part."""
        self.cut()
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._digest.update(data)

    def position(self) -> dict[str, Any]:
        """Return size and digest of the file; raises ``FileNotFoundError`` if it was removed or replaced."""
        try:
            is_same_file = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except OSError:
            is_same_file = False
        if not is_same_file:
            raise FileNotFoundError(f"{self.path} was removed or replaced during the run, and its content is lost")
        return {"size": self._file.tell(), "xxh3_128": self._digest.hexdigest()}

    def flush(self) -> None:
        """Force everything written so far onto the disk."""
        self.cut()
        os.fsync(self._file.fileno())

    def cut(self) -> None:
        """Remove the content after the position at which the file was reopened."""
        if self.needs_cut:
            self._file.truncate()
            self.needs_cut = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class FileSink(RecordSink):
    """A sink that writes the text files in :meth:`file_names` for each strategy, overwriting older ones.

    A killed process loses nothing; after :meth:`flush` a power cut does not, either.
    """

    notation: ClassVar[Mapping[str, str]] = {}  # further properties of the format, stored in checkpoints

    draws: ClassVar[bool] = False

    def __init__(self) -> None:
        self._files: list[RunFile] = []

    @abstractmethod
    def header(self, run: "RunInfo", position: Mapping[str, Any]) -> str:
        """Return the first line of a run's first file, or an empty text.

        Raises:
            UsageError: if the file cannot be continued at the ``position`` of a checkpoint (empty for a new file).
        """

    def set_run_context(self, run: "RunInfo") -> None:
        """Start the strategy's files."""
        self.close("")
        self._files = [RunFile(run.output_dir / name) for name in self.file_names(run.strategy)]
        self._write(self.header(run, {}))

    def resume(self, run: "RunInfo", position: Mapping[str, Any]) -> None:
        """Reopen the strategy's files at the position; raises :class:`UsageError` if one has changed."""
        self.close("")
        header = self.header(run, position).encode()

        def fault(file: FileIO, size: int) -> str:
            if file.read(len(header)) != header:
                return "its first line does not belong to this run with its hooks"
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                return f"no line ends at byte {size:,}, as one did at the checkpoint"
            return ""

        first, *others = self.file_names(run.strategy)
        self._files = [RunFile(run.output_dir / first, position, fault)]
        try:
            for name in others:  # an earlier version may not have written this file
                self._files.append(RunFile(run.output_dir / name, position.get(name)))
        except UsageError:
            self.close("failed")
            raise

    def position(self) -> dict[str, Any]:
        """Return size and digest of the first file, those of the others by name, and the notation.

        All content has reached the operating system. Raises ``FileNotFoundError`` if a file was removed or replaced.
        """
        first, *others = self._opened()
        return {**first.position(), **{file.path.name: file.position() for file in others}, **self.notation}

    def files(self) -> Sequence[Path]:
        """Return the paths of the strategy's files, if they are open."""
        return [file.path for file in self._files]

    def flush(self) -> None:
        """Force everything emitted so far onto the disk."""
        for file in self._files:
            file.flush()

    def close(self, status: str) -> None:
        """Close the strategy's files; a run that failed before its first row leaves them unchanged.

        Closing twice does nothing.
        """
        files, self._files = self._files, []
        for file in files:
            if status != "failed":
                file.cut()
            file.close()

    def _write(self, text: str, file: int = 0) -> None:
        """Append ``text`` to the file with this index; raises ``RuntimeError`` if no strategy is running."""
        self._opened()[file].write(text.encode())

    def _opened(self) -> list[RunFile]:
        if not self._files:
            raise RuntimeError(
                f"No .{self.name} file is open: call emit and position after set_run_context(run) and before "
                "close(status)."
            )
        return self._files


def size_at(position: Any) -> int:
    """Return the size of a file at a checkpoint, in bytes; raises :class:`UsageError` if it is not stored."""
    size = position.get("size") if isinstance(position, Mapping) else None
    if type(size) is not int or size < 0:
        raise UsageError(f"The checkpoint has no valid size of a file of the run, but {size!r}; {_remedy()}")
    return size


def complete_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their line ends; a truncated last line is skipped."""
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from (line for line in file if line.endswith("\n"))
