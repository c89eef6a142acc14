"""Checkpoints on the disk: folders that are written whole or not at all, checked byte by byte before they are used."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from ..durable_files import plain_json, read_tensors, refusal_of_disk, write_tensors
from ..errors import UsageError

FORMAT = 4
STATE, MANIFEST = "state.pt", "manifest.json"
AFRESH = "afresh"
"""In the content for a rank that has no stored random streams."""
RANK = "rank_{}.pt"
"""The file of one of several processes, by its number."""
PARTIAL, REMOVED = ".partial", ".removed"


class DamagedCheckpointError(UsageError):
    """A checkpoint that is not what was written; an older one may be used in its place."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is intact; the state is checked when it is read."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Steps that were done."""
        return int(self.manifest["step"])

    @property
    def score(self) -> float | None:
        """By which checkpoints are compared, the lowest being the best; ``None`` before the first evaluation."""
        return _as_float(self.manifest["score"])

    def check(self, names: Sequence[str] | None = None) -> None:
        """Raise :class:`DamagedCheckpointError` unless files, by default all, are as they were written."""
        for name in self.manifest["files"] if names is None else names:
            path, expected = self.folder / name, self.manifest["files"][name]
            try:
                size, wanted = path.stat().st_size, expected["bytes"]
                if size != wanted:
                    raise DamagedCheckpointError(f"{path} has {size} bytes instead of {wanted}: it is damaged.")
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
            except OSError as error:
                raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}.") from error
            if found != expected["xxh3_128"]:
                raise DamagedCheckpointError(f"{path} is damaged: its bytes are not those that were written.")

    @property
    def is_of_ranks(self) -> bool:
        """Whether several processes wrote it, each a file."""
        return "ranks" in self.manifest

    def content(self) -> dict[str, Any]:
        """Check the file of one process and read the state; executes no code from it."""
        self.check()
        return load_plainly(self.folder / STATE)


def load_plainly(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a file of tensors and plain values, whose bytes were checked before; executes no code from it.

    Tensors that are ``mapped`` are read from the disk when they are used.
    """
    try:
        # On the CPU, since the run may go on with fewer devices than it had.
        content = read_tensors(path, mapped=mapped)
    except Exception as error:
        reason = " ".join(str(error).split(".")[0].split())
        raise DamagedCheckpointError(f"{path} cannot be loaded without executing code from it: {reason}.") from error
    if not isinstance(content, dict):
        raise DamagedCheckpointError(f"{path} holds a {type(content).__name__} instead of a training state.")
    return content


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint; names sort by step."""
    return f"step_{step:09d}"


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open one checkpoint; raises :class:`DamagedCheckpointError`, or :class:`UsageError` for one of a newer format."""
    path = folder / MANIFEST
    if not path.is_file():
        what = "is not a checkpoint" if folder.is_dir() else "does not exist"
        raise DamagedCheckpointError(f"{folder} {what}: there is no {path.name} in it.")
    try:
        manifest = json.loads(path.read_text("utf-8"))
        digest = manifest.pop("digest")
        intact = digest == _digest_of_manifest(manifest)
        version = manifest["format"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {type(error).__name__}.") from error
    if not intact or not isinstance(version, int):
        raise DamagedCheckpointError(f"{path} is damaged: its text is not the one that was written.")
    if version != FORMAT:
        age = "newer" if version > FORMAT else "older"
        raise DamagedCheckpointError(
            f"{folder} is a checkpoint of format {version}, written by a{'n' * (age == 'older')} {age} loopscope; this "
            f"one reads format {FORMAT}."
        )
    if not _is_whole(manifest):
        raise DamagedCheckpointError(f"{path} does not describe a checkpoint: step, score or files are missing in it.")
    return Checkpoint(folder, manifest)


def _is_whole(manifest: Mapping[str, Any]) -> bool:
    """Return whether a manifest has what is read of it before the state is."""
    files = manifest.get("files")
    return (
        isinstance(manifest.get("step"), int)
        and isinstance(manifest.get("epoch", 0), int)
        and "score" in manifest
        and isinstance(files, dict)
        and (files.keys() == {STATE} or _is_of_all_ranks(manifest))
        and all(isinstance(each, dict) and each.keys() == {"bytes", "xxh3_128"} for each in files.values())
    )


def _is_of_all_ranks(manifest: Mapping[str, Any]) -> bool:
    ranks = manifest.get("ranks")
    return (
        isinstance(ranks, dict)
        and isinstance(manifest.get("tensors"), dict)
        and manifest["files"].keys() == {RANK.format(number) for number in range(len(ranks.get("indices", ())))}
    )


def _as_float(score: Any) -> float | None:
    """Return what an experiment's evaluation gave as a number: too large an integer is infinite, other things none."""
    try:
        return float(score) if isinstance(score, (int, float)) else None
    except OverflowError:
        return math.inf if score > 0 else -math.inf


def checkpoints_in(folder: Path) -> Iterator[Path]:
    """Yield the folders of a run's checkpoints, the newest first."""
    found = [path for path in folder.glob("step_*") if path.suffix not in (PARTIAL, REMOVED)]
    yield from sorted(found, key=lambda path: path.name, reverse=True)


def intact_in(folder: Path) -> Iterator[Checkpoint]:
    """Yield a run's checkpoints whose manifests are intact, the oldest first."""
    for path in reversed([*checkpoints_in(folder)]):
        try:
            checkpoint = open_checkpoint(path)
        except DamagedCheckpointError:
            continue
        yield checkpoint


def newest_intact(folder: Path, tell: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint that is intact, and ``tell`` of every newer one why it is not used."""
    for path in checkpoints_in(folder):
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.check()
        except DamagedCheckpointError as error:
            tell(str(error))
        else:
            return checkpoint
    return None


def write_checkpoint(
    folder: Path,
    content: Mapping[str, Any],
    manifest: Mapping[str, Any],
    before: Sequence[Path] = (),
    spare: Path | None = None,
) -> Checkpoint:
    """Write a checkpoint under a temporary name, force it onto the disk, and only then give it its name.

    One of that name is replaced. The files ``before``, those of the sinks, are on the disk before the checkpoint
    counts; those of a ``spare`` one, set aside, are written over, which takes half the time of new ones.
    Raises :class:`LoopscopeError` where the file system refuses; nothing that was there is lost then.
    """
    growing = GrowingCheckpoint(folder, spare)
    try:
        growing.begin()
        return growing.complete(manifest, {STATE: growing.write(STATE, content)}, before)
    finally:
        growing.remove()


class GrowingCheckpoint:
    """A checkpoint while it is written, under a temporary name: :func:`write_checkpoint` step by step."""

    def __init__(self, folder: Path, spare: Path | None = None) -> None:
        self.folder, self._spare = folder, spare
        self._partial = folder.with_name(folder.name + PARTIAL)

    def begin(self) -> None:
        """Make the folder for all files, of one process or of several."""
        with refusal_of_disk(self.folder):
            self.remove()
            if self._spare is None or not self._spare.is_dir():
                self._partial.mkdir(parents=True)
            else:
                self._spare.rename(self._partial)

    def write(self, name: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Write a file and return its size and digest."""
        path = self._partial / name
        with refusal_of_disk(self.folder), path.open("r+b" if path.is_file() else "wb") as file:
            digesting = _Digesting(file)
            _save(content, digesting)
            # A spare file may have been longer.
            file.truncate()
            _sync(file)
        return digesting.summary()

    def complete(self, manifest: Mapping[str, Any], files: Mapping[str, Any], before: Sequence[Path]) -> Checkpoint:
        """Write the manifest and give the checkpoint its name."""
        full = {**plain_json(manifest), "format": FORMAT, "files": dict(files)}
        with refusal_of_disk(self.folder):
            with (self._partial / MANIFEST).open("w", encoding="utf-8") as file:
                json.dump({**full, "digest": _digest_of_manifest(full)}, file, indent=None if "tensors" in full else 2)
                _sync(file)
            for path in (*before, *{path.parent for path in before}, self._partial):
                sync_path(path)
            removed = set_aside(self.folder)
            # A rename happens wholly or not at all, so that a crash leaves no checkpoint that is half there.
            self._partial.rename(self.folder)
            sync_path(self.folder.parent)
            shutil.rmtree(removed, ignore_errors=True)
        return Checkpoint(self.folder, full)

    def remove(self) -> None:
        """Remove what is not complete."""
        shutil.rmtree(self._partial, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Take a checkpoint's name from it, if it is there, and return the new one, which no crash makes a checkpoint."""
    removed = folder.with_name(folder.name + REMOVED)
    shutil.rmtree(removed, ignore_errors=True)
    with suppress(FileNotFoundError):
        folder.rename(removed)
    return removed


def remove_leftovers(folder: Path) -> None:
    """Remove what a crash left of checkpoints half written or half removed."""
    for kind in (PARTIAL, REMOVED):
        for path in folder.glob(f"step_*{kind}"):
            shutil.rmtree(path, ignore_errors=True)


def sync_path(path: Path) -> None:
    """Force what was written to a file, or the names in a folder, onto the disk; one that is gone is left out."""
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Digesting:
    """A file that digests what is written to it."""

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


def _save(content: Mapping[str, Any], file: _Digesting) -> None:
    """Write with ``torch.save``, without checksums of its own: they take longer than all the rest."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        write_tensors(content, file)
    finally:
        torch.serialization.set_crc32_options(before)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _digest_of_manifest(manifest: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())
