"""The folder of one strategy's run: what lies in it under which name, and who may write there."""

import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..checkpoints import DIGESTS, ROWS, checkpoint_folders, run_lock
from ..durable_files import is_there, refusal_of_disk, save_tensors, write_json
from ..errors import UsageError, listed, place_of
from ..hooks import HookRegistry, SinkRegistry
from ..state import whole
from .records import CONFIG, SUMMARY, RunRecord, read_completed, read_status, seed_name

CHECKPOINTS = "checkpoints"
REWINDS = "rewinds"
"""The folder of what was trained again."""
EXPLANATION = "explanation.json"
"""In a folder there: what :mod:`loopscope.explaining` made of a step."""

OVERWRITING = "choose another --output-dir, or write over it with --overwrite"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one strategy's run, which need not exist."""

    path: Path
    strategy: str
    _made: list[Path] = field(default_factory=list, init=False)
    """The folders that did not exist before, outermost first."""
    _found: dict[Path, tuple[int, ...]] = field(default_factory=dict, init=False)
    """What lay here when it was asked whether this may be written over."""

    @property
    def name(self) -> str:
        """What tells the run from the others of its experiment: its strategy, and its seed if that has a folder."""
        own = self.path.name
        is_seed = own != self.strategy and re.fullmatch(seed_name(r"\d+"), own)
        return f"{self.strategy} {own}" if is_seed else self.strategy

    @property
    def weights(self) -> Path:
        """Where the final weights lie."""
        return self.path / weights_name(self.strategy)

    @property
    def reference(self) -> Path:
        """Where final weights that a run has written over lie, if it measures against them."""
        return self.path / reference_name(self.strategy)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / CHECKPOINTS

    def newest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint, if there is one."""
        return next(checkpoint_folders(self.checkpoints), None)

    def record(self) -> RunRecord | None:
        """Return what was run here, if a run was; raises :class:`UsageError` where the file does not say it."""
        return RunRecord.read(self.path) if is_there(self.path / CONFIG) else None

    def completed(self) -> dict[str, Any] | None:
        """Return the summary of a run that is complete, if one lies here; :class:`UsageError` for a damaged one."""
        return read_completed(self.path) if is_there(self.weights) else None

    def refuse_to_overwrite(self, *, allowed: bool, remedy: str = OVERWRITING) -> None:
        """Raise :class:`UsageError` if a run lies here, and say its remedy, or if the folder cannot be written."""
        try:
            if not allowed and any(path.exists() for path in self._left_by_a_run()):
                raise UsageError(f"{self.path} already holds {self._earlier_run()}, which is left as it is; {remedy}.")
            self._found.update(self._lying())
            existing = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        except OSError as error:
            raise self._not_writable(error.strerror) from error
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise self._not_writable(f"{existing} is not a writable folder")

    def enter(self, held: ExitStack) -> None:
        """Make the folder and lock it, as long as ``held`` is open; until then another process may have run here."""
        self.make()
        held.enter_context(run_lock(self.path))
        self._refuse_what_came_meanwhile()

    def _refuse_what_came_meanwhile(self) -> None:
        """Raise :class:`UsageError` if anything of a run lies here that did not when it was asked before."""
        try:
            came = [path.name for path, which in self._lying().items() if self._found.get(path) != which]
        except OSError as error:
            raise self._not_writable(error.strerror) from error
        if came:
            raise UsageError(
                f"{self.path} was written by another process since this command began: {listed(came, 3)}. It holds "
                f"{self._earlier_run()}, which is left as it is; start the command again to go by what lies there now."
            )

    def _lying(self) -> dict[Path, tuple[int, ...]]:
        """Return what of a run lies here, each with what changes when it is written or replaced."""
        stats = [(path, path.lstat()) for path in self._left_by_a_run() if os.path.lexists(path)]
        return {path: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in stats}

    def make(self) -> None:
        """Make the folder; what lies in it stays as it is."""
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            for path in reversed(missing):
                path.mkdir(exist_ok=True)
                self._made.append(path)
        except OSError as error:
            self.give_back()
            raise self._not_writable(error.strerror) from error

    def make_new(self) -> bool:
        """Make the folder, and return whether it was this call that made it rather than another process."""
        parent = RunFolder(self.path.parent, self.strategy)
        parent.make()
        self._made.extend(parent._made)
        try:
            self.path.mkdir()
        except FileExistsError:
            return False
        except OSError as error:
            self.give_back()
            raise self._not_writable(error.strerror) from error
        self._made.append(self.path)
        return True

    def give_back(self) -> None:
        """Remove the folders that were made, unless something lies in them by now."""
        with suppress(OSError):
            while self._made:
                self._made.pop().rmdir()

    def claim(self, reference: Path | None = None) -> Path | None:
        """Remove what an earlier run left here, of which nothing else would be written over.

        Its final weights stay under another name if they are the ``reference`` of the run that begins, which may have
        to be resumed with them. Return where the reference lies from now on.
        """
        lies = None if reference is None else reference.resolve()
        with refusal_of_disk(self.path):
            if lies == self.weights.resolve():
                self.weights.replace(self.reference)
                reference = self.reference
            elif lies != self.reference.resolve():
                self.reference.unlink(missing_ok=True)
            for path in self._left_by_a_run():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        return reference

    def write_record(self, record: RunRecord) -> None:
        """Write what is run."""
        write_json(self.path / CONFIG, vars(record))

    def write_missing_record(self, record: RunRecord) -> None:
        """Write what is run once more if somebody removed it meanwhile, and tell of it: no resume works without."""
        if not os.path.lexists(self.path / CONFIG):
            warnings.warn(f"{self.path / CONFIG} was removed under the run; it is written again.", stacklevel=2)
            self.write_record(record)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write how it went."""
        write_json(self.path / SUMMARY, summary)

    def write_weights(self, model: nn.Module) -> None:
        """Write the final weights as a state dict, whole also where ranks hold parts of them, which all must call."""
        save_tensors(tree_map_only(Tensor, whole, model.state_dict()), self.weights)

    def _left_by_a_run(self) -> Iterator[Path]:
        """Yield every path that a run may write here; a run is recognised by the last one, which is removed last."""
        for entry in (*SinkRegistry, *HookRegistry):
            names: Any = entry.leaves(self.strategy)
            named = isinstance(names, (list, tuple)) and all(Path(str(name)).name == name for name in names)
            if not named:
                remedy = "leaves(cls, strategy) returns a list of names of files"
                raise UsageError(f"{place_of(entry)} leaves {names!r}; {remedy}.")
            yield from (self.path / name for name in names)
        yield from (self.weights, self.checkpoints)
        yield from (self.path / name for name in (REWINDS, DIGESTS, ROWS, SUMMARY, CONFIG))

    def _earlier_run(self) -> str:
        """Say in a few words what lies here."""
        try:
            status = read_status(self.path)
        except UsageError:
            return f"a run whose {SUMMARY} cannot be read"
        if status is None:
            return "an unfinished run"
        return "a finished run" if status == "completed" else f"a run that ended as {status!r}"

    def _not_writable(self, reason: str | None) -> UsageError:
        return UsageError(f"The output directory {self.path} cannot be written: {reason}.")


def weights_name(strategy: str) -> str:
    """Return the name of the file of a strategy's final weights."""
    return f"{strategy}_final.pt"


def reference_name(strategy: str) -> str:
    """Return the name of the file of the final weights that a run has written over and measures against."""
    return f"{strategy}_reference.pt"
