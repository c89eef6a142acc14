"""The folder of one strategy's run: its file names, and protection against overwriting and concurrent writers."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..checkpoints import DIGESTS, ROWS, checkpoint_folders, run_lock
from ..durable_files import path_exists, save_tensors, translated_disk_errors, write_json
from ..errors import UsageError, listed, short_path, source_location, warn
from ..hooks import HookRegistry, SinkRegistry
from ..tensors import unsharded
from .file_manifest import FILES, write_manifest
from .records import CONFIG, REWINDS, SUMMARY, TRAINED, RunRecord, read_completed, read_status, run_name

CHECKPOINTS = "checkpoints"
OVERWRITING = "choose another --output-dir, or replace it with --overwrite"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one strategy's run, which need not exist."""

    path: Path
    strategy: str
    _created: list[Path] = field(default_factory=list, init=False)
    """The folders that this object has created, outermost first."""
    _known_files: dict[Path, tuple[int, ...]] = field(default_factory=dict, init=False)
    """The files of a run that existed when overwriting was checked, with their identities."""

    @property
    def name(self) -> str:
        """The run's name within its experiment: its strategy, and its seed if that has a folder."""
        return run_name(self.path, self.strategy)

    @property
    def weights(self) -> Path:
        """The path of the final weights."""
        return self.path / weights_name(self.strategy)

    @property
    def reference(self) -> Path:
        """The path of the final weights that a run has replaced but measures against."""
        return self.path / reference_name(self.strategy)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / CHECKPOINTS

    def newest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint, or ``None``."""
        return next(checkpoint_folders(self.checkpoints), None)

    def record(self) -> RunRecord | None:
        """Return the record of the run, or ``None`` if it has none; raise :class:`UsageError` for a damaged one."""
        return RunRecord.read(self.path) if path_exists(self.path / CONFIG) else None

    def completed(self) -> dict[str, Any] | None:
        """Return the summary if the run is complete, else ``None``; raise :class:`UsageError` for a damaged one."""
        return read_completed(self.path) if path_exists(self.weights) else None

    def refuse_to_overwrite(self, *, allowed: bool, advice: str = OVERWRITING) -> None:
        """Raise :class:`UsageError`, with ``advice``, if the folder contains a run or cannot be written."""
        try:
            if not allowed and any(path.exists() for path in self._run_files()):
                raise UsageError(
                    f"{short_path(self.path)} already holds {self._earlier_run()}, which is left unchanged; {advice}."
                )
            self._known_files.update(self._existing_files())
            existing = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        except OSError as error:
            raise self._not_writable(error.strerror) from error
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise self._not_writable(f"{existing} is not a writable folder")

    def enter(self, contexts: ExitStack) -> None:
        """Create the folder, and lock it until ``contexts`` closes; refuse files that another process has written."""
        self.make()
        contexts.enter_context(run_lock(self.path))
        self._refuse_new_files()

    def _refuse_new_files(self) -> None:
        """Raise :class:`UsageError` if files of a run have appeared or changed since overwriting was checked."""
        try:
            files = self._existing_files().items()
            new_files = [path.name for path, identity in files if self._known_files.get(path) != identity]
        except OSError as error:
            raise self._not_writable(error.strerror) from error
        if new_files:
            raise UsageError(
                f"Another process has written to {short_path(self.path)} since this command started: "
                f"{listed(new_files, 3)}. The folder contains {self._earlier_run()}, which is left unchanged; start "
                "the command again."
            )

    def _existing_files(self) -> dict[Path, tuple[int, ...]]:
        """Return the existing files of a run, each with inode, modification time and size."""
        stats = [(path, path.lstat()) for path in self._run_files() if os.path.lexists(path)]
        return {path: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in stats}

    def make(self) -> bool:
        """Create the folder, keeping existing content, and return whether this call has created it."""
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            for path in reversed(missing):
                with suppress(FileExistsError):  # another process has created it in between
                    path.mkdir()
                    self._created.append(path)
        except OSError as error:
            self.remove_created()
            raise self._not_writable(error.strerror) from error
        return self.path in self._created

    def remove_created(self) -> None:
        """Remove the folders that this object has created, except those that are no longer empty."""
        with suppress(OSError):
            while self._created:
                self._created.pop().rmdir()

    def claim(self, reference: Path | None = None) -> Path | None:
        """Remove all files of an earlier run, and return the path of the reference from now on.

        If the earlier run's final weights are the ``reference`` of the new run, they are renamed and kept, since a
        resume needs them.
        """
        resolved = None if reference is None else reference.resolve()
        with translated_disk_errors(self.path):
            if resolved == self.weights.resolve():
                self.weights.replace(self.reference)
                reference = self.reference
            elif resolved != self.reference.resolve():
                self.reference.unlink(missing_ok=True)
            for path in self._run_files():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        return reference

    def write_record(self, record: RunRecord) -> None:
        """Write the record of the run."""
        write_json(self.path / CONFIG, vars(record))

    def write_missing_record(self, record: RunRecord) -> None:
        """Write the record again, with a warning, if it was removed during the run; a resume needs it."""
        if not os.path.lexists(self.path / CONFIG):
            warn(f"{self.path / CONFIG} was removed during the run; it is written again.", stacklevel=2)
            self.write_record(record)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary of the run, and the manifest of its files, which are complete now."""
        write_json(self.path / SUMMARY, summary)
        write_manifest(self.path, (*self._run_files(), self.reference))

    def remove_manifest(self) -> None:
        """Remove the manifest of a finished run, whose files will change."""
        with translated_disk_errors(self.path):
            (self.path / FILES).unlink(missing_ok=True)

    def write_weights(self, model: nn.Module) -> None:
        """Write the final weights as a complete state dict. With sharded weights this is a collective call."""
        save_tensors(tree_map_only(Tensor, unsharded, model.state_dict()), self.weights)

    def _run_files(self) -> Iterator[Path]:
        """Yield every path that a run may write, the record last: it identifies a run, so it is removed last."""
        for entry in (*SinkRegistry, *HookRegistry):
            names: Any = entry.file_names(self.strategy)
            is_valid = isinstance(names, (list, tuple)) and all(Path(str(name)).name == name for name in names)
            if not is_valid:
                accepted = "file_names(cls, strategy) must return a list of file names"
                raise UsageError(f"file_names() of {source_location(entry)} returned {names!r}; {accepted}.")
            yield from (self.path / name for name in names)
        yield from (self.weights, self.checkpoints)
        yield from (self.path / name for name in (REWINDS, DIGESTS, ROWS, FILES, SUMMARY, CONFIG))

    def _earlier_run(self) -> str:
        """Describe the run in this folder in a few words."""
        try:
            status = read_status(self.path)
        except UsageError:
            return f"a run whose {SUMMARY} cannot be read"
        if status is None:
            return "an unfinished run"
        return "a finished run" if status in TRAINED else f"a run that ended as {status!r}"

    def _not_writable(self, reason: str | None) -> UsageError:
        return UsageError(f"The output directory {short_path(self.path)} cannot be written: {reason}.")


def weights_name(strategy: str) -> str:
    """Return the file name of a strategy's final weights."""
    return f"{strategy}_final.pt"


def reference_name(strategy: str) -> str:
    """Return the file name of the final weights that a run has replaced but measures against."""
    return f"{strategy}_reference.pt"
