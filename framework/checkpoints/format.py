"""Checkpoint format on disk: folders that appear atomically, with digests of all files that are checked before use."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from ..durable_files import plain_json, read_tensors, translated_disk_errors, write_tensors
from ..errors import UsageError
from ..file_digests import digest_of, verified_content, with_checksum

FORMAT = 5
STATE, MANIFEST = "state.pt", "manifest.json"
FRESH_STREAMS = "afresh"
"""Key in the content for a rank that has no stored random streams, so that it must start new ones."""
RANK_FILE = "rank_{}.pt"
"""Name of the file of one of several processes, by its number."""
PARTIAL, REMOVED = ".partial", ".removed"


class DamagedCheckpointError(UsageError):
    """A checkpoint whose files differ from those that were written; an older checkpoint may replace it."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is intact; its state is checked when it is read."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return int(self.manifest["step"])

    @property
    def score(self) -> float | None:
        """The score that ranks checkpoints, the lowest being the best; ``None`` before the first evaluation."""
        score: float | None = self.manifest["score"]
        return score

    def check(self, names: Sequence[str] | None = None) -> None:
        """Raise :class:`DamagedCheckpointError` unless the named files, by default all, have their original bytes."""
        for name in self.manifest["files"] if names is None else names:
            path, expected = self.folder / name, self.manifest["files"][name]
            try:
                size, original_size = path.stat().st_size, expected["bytes"]
                if size != original_size:
                    raise DamagedCheckpointError(f"{path} has {size} bytes instead of {original_size}: it is damaged.")
                digest = digest_of(path, size)
            except OSError as error:
                raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}.") from error
            if digest != expected["xxh3_128"]:
                raise DamagedCheckpointError(f"{path} is damaged: its bytes are not those that were written.")

    @property
    def is_of_ranks(self) -> bool:
        """Whether several processes wrote it, one file each."""
        return "ranks" in self.manifest

    def content(self) -> dict[str, Any]:
        """Check and read the state that a single process wrote; executes no code from it."""
        self.check()
        return load_plainly(self.folder / STATE)


def load_plainly(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a file of tensors and plain values whose bytes have been checked; executes no code from it.

    With ``mapped`` its tensors are memory-mapped, so that the disk is read when they are used.
    """
    try:
        # On the CPU, since the run may resume with fewer devices than it had.
        content = read_tensors(path, mapped=mapped)
    except Exception as error:
        reason = " ".join(str(error).split(".")[0].split())
        raise DamagedCheckpointError(f"{path} cannot be loaded without executing code from it: {reason}.") from error
    return dict(content)


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint; names sort by step."""
    return f"step_{step:09d}"


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open one checkpoint and check its manifest.

    Raises:
        DamagedCheckpointError: if the manifest is missing, damaged or of another format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        problem = f"is not a checkpoint: it has no {path.name}" if folder.is_dir() else "does not exist"
        raise DamagedCheckpointError(f"{folder} {problem}.")
    try:
        manifest = verified_content(json.loads(path.read_text("utf-8")))
        version = manifest["format"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: its text is not what was written.") from error
    if version != FORMAT:
        age = "newer" if version > FORMAT else "older"
        raise DamagedCheckpointError(
            f"{folder} is a checkpoint of format {version}, written by a{'n' * (age == 'older')} {age} loopscope; this "
            f"version reads format {FORMAT}."
        )
    return Checkpoint(folder, manifest)


def checkpoint_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of a run's checkpoints, newest first."""
    paths = [path for path in folder.glob("step_*") if path.suffix not in (PARTIAL, REMOVED)]
    yield from sorted(paths, key=attrgetter("name"), reverse=True)


def intact_checkpoints(folder: Path) -> Iterator[Checkpoint]:
    """Yield a run's checkpoints with intact manifests, oldest first."""
    for path in reversed([*checkpoint_folders(folder)]):
        try:
            checkpoint = open_checkpoint(path)
        except DamagedCheckpointError:
            continue
        yield checkpoint


def newest_intact(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest intact checkpoint, and ``report`` why each newer one cannot be used."""
    for path in checkpoint_folders(folder):
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.check()
        except DamagedCheckpointError as error:
            report(str(error))
        else:
            return checkpoint
    return None


def write_checkpoint(
    folder: Path,
    content: Mapping[str, Any],
    manifest: Mapping[str, Any],
    sync_first: Sequence[Path] = (),
    spare: Path | None = None,
) -> Checkpoint:
    """Write a checkpoint under a temporary name, sync it to disk, then rename it, replacing one of the same name.

    The files ``sync_first``, those of the sinks, are synced before the rename. The files of a discarded checkpoint,
    ``spare``, are overwritten, which takes half the time of creating new ones.

    Raises:
        LoopscopeError: if the file system refuses a write; existing checkpoints are kept.
    """
    partial = PartialCheckpoint(folder, spare)
    try:
        partial.create_folder()
        return partial.complete(manifest, {STATE: partial.write(STATE, content)}, sync_first)
    finally:
        partial.remove()


class PartialCheckpoint:
    """A checkpoint that is being written under a temporary name: the stages of :func:`write_checkpoint`."""

    def __init__(self, folder: Path, spare: Path | None = None) -> None:
        self.folder, self._spare = folder, spare
        self._partial = folder.with_name(folder.name + PARTIAL)

    def create_folder(self) -> None:
        """Create the temporary folder for the files of all processes."""
        with translated_disk_errors(self.folder):
            self.remove()
            if self._spare is None or not self._spare.is_dir():
                self._partial.mkdir(parents=True)
            else:
                self._spare.rename(self._partial)

    def write(self, name: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Write a file and return its size and digest."""
        path = self._partial / name
        with translated_disk_errors(self.folder), path.open("r+b" if path.is_file() else "wb") as file:
            digesting = _DigestingFile(file)
            _save(content, digesting)
            # An overwritten file may have been longer.
            file.truncate()
            _sync(file)
        return digesting.summary()

    def complete(self, manifest: Mapping[str, Any], files: Mapping[str, Any], sync_first: Sequence[Path]) -> Checkpoint:
        """Write the manifest, then rename the folder to the checkpoint's final name."""
        full = {**plain_json(manifest), "format": FORMAT, "files": dict(files)}
        with translated_disk_errors(self.folder):
            with (self._partial / MANIFEST).open("w", encoding="utf-8") as file:
                json.dump(with_checksum(full), file, indent=None if "tensors" in full else 2)
                _sync(file)
            for path in (*sync_first, *{path.parent for path in sync_first}, self._partial):
                sync_path(path)
            removed = set_aside(self.folder)
            # A rename is atomic, so that a crash leaves no incomplete checkpoint under the final name.
            self._partial.rename(self.folder)
            sync_path(self.folder.parent)
            shutil.rmtree(removed, ignore_errors=True)
        return Checkpoint(self.folder, full)

    def remove(self) -> None:
        """Remove the incomplete checkpoint."""
        shutil.rmtree(self._partial, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint's folder, if it exists, so that it no longer counts as one, and return the new path."""
    removed = folder.with_name(folder.name + REMOVED)
    shutil.rmtree(removed, ignore_errors=True)
    with suppress(FileNotFoundError):
        folder.rename(removed)
    return removed


def remove_leftovers(folder: Path) -> None:
    """Remove partly written and partly removed checkpoints that a crash has left."""
    for kind in (PARTIAL, REMOVED):
        for path in folder.glob(f"step_*{kind}"):
            shutil.rmtree(path, ignore_errors=True)


def sync_path(path: Path) -> None:
    """Sync a file's content, or a folder's entries, to disk; a missing path is ignored."""
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _DigestingFile:
    """A file that computes the digest of the bytes written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self._bytes = 0

    def write(self, data: Any) -> int:
        self._digest.update(data)
        written = self._file.write(data)
        self._bytes += written
        return written

    def flush(self) -> None:
        self._file.flush()

    def summary(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "xxh3_128": self._digest.hexdigest()}


def _save(content: Mapping[str, Any], file: _DigestingFile) -> None:
    """Write with ``torch.save`` without its CRC32 checksums, which take longer than the rest of the write."""
    crc32_option = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        write_tensors(content, file)
    finally:
        torch.serialization.set_crc32_options(crc32_option)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
